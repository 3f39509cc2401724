"""Training without padding: samples that share a row, and the attention that keeps them apart."""
