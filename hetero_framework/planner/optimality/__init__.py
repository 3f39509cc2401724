"""Branch and bound: whether any layout of a small fleet is better."""
