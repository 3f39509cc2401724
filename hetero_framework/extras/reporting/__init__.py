"""Reporting: callbacks of transformers, reporters, the hub, and metrics that users compute."""
