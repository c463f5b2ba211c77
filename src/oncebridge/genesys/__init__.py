"""Genesys Cloud: rules for its events, verification of conversations, and a simulator."""
