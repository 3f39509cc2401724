"""Pairing and keys: a machine joins with one pasted line; keys are listed, revoked and rotated."""
