"""Configurations in YAML, also those of other programs."""
