"""What we know about Genesys Cloud's events."""
