"""Rewards and labels: reward models and classifiers, and the labelled data that they learn from."""
