"""What the Postgres store and the Postgres sink share: addresses, connections, tables."""
