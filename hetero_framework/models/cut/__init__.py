"""Cutting a model into shards: its structure, its parts, and the forward of a part."""
