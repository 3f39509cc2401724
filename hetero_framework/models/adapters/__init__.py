"""Adapters: their plan over the whole model, and their part in each shard."""
