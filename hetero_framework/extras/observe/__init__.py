"""Observing a run: its timeline, what bounds its speed, its curves and diagrams."""
