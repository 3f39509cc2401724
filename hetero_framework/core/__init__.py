"""Bytes, links and devices. Knows nothing of models or of the configuration."""
