"""Analysis of a run's steps: where their time went."""
