"""Chains: models that are an `nn.Sequential`, trained on the tensors of a user's data set."""
