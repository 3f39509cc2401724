"""Files of models: reading checkpoints and writing results."""
