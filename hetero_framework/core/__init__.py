"""Bytes, links and devices: knows nothing of models or of the configuration."""
