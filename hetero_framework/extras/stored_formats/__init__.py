"""Checkpoints as they are published: weights of few bits, made full while a shard loads."""
