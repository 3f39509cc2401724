"""Results made after a run: from a checkpoint, or by folding an adapter into its model."""
