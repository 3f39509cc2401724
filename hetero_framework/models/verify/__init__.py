"""Checks of a cut: it computes the same as the whole model, and only known tensors cross it."""
