"""Results after a run: of a checkpoint, and adapters folded into their models."""
