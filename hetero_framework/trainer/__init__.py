"""The run, from its first step to its files."""
