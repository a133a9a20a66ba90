"""Log-probabilities of chosen and of the most likely ids."""
