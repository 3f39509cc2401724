"""The search for the best layout of a fleet."""
