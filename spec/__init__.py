"""The protocol as a checked model: `python -m spec.check`."""
