"""Configurations in YAML, also those of other programs, and recipes of them."""
