"""Chains: models that are an `nn.Sequential`, trained on tensors of a data set of the user's."""
