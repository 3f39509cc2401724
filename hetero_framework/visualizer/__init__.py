"""Pictures of plans and steps, and the display of a running training."""
