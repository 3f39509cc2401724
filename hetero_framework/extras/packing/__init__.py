"""Packing: examples are put together into rows of about one length before training."""
