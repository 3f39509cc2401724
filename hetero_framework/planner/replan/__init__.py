"""Whether a run should take another plan, from what its steps took."""
