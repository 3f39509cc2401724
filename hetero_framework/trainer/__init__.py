"""Training: stages, their schedule, the processes that hold them, and the loop that drives them."""
