"""Files of models: what is read from a checkpoint, and what a run writes."""
