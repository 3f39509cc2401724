"""Training data that are read and tokenised while a run goes on."""
