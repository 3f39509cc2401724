"""Rewards and labels: reward models and classifiers, and the data with labels they learn from."""
