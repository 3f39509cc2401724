"""Training data of several sources, and examples that are held out of them."""
