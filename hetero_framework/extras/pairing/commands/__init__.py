"""Commands of this extra."""
