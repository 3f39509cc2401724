"""Memory and work of a model's parts, without loading it."""
