"""What is checked of a cut: that it computes the same, and what crosses it."""
