"""Verification on demand: a model is cut and compared with the whole."""
