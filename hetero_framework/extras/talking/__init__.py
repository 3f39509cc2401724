"""Talking: chat, generation, and samples of a model while it trains."""
