"""`oncebridge audit`: duplicates in recorded events, their causes, and a suggested configuration."""
