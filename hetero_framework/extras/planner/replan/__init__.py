"""Replanning: decides from the times of its steps whether a run should take another plan."""
