"""Everything that will bite, before it bites."""
