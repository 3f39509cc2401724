"""The schedule of a step: its simulation, tuning and order."""
