"""Checkpoints as they are published: weights of few bits, dequantised while a shard loads."""
