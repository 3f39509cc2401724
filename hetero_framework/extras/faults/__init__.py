"""Planted faults: a process fails at a named place, for tests and drills."""
