"""Preferences: objectives that learn from a chosen and a rejected answer, or from ratings."""
