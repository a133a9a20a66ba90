"""Top-k, top-p and min-p without a sort of the vocabulary, and the log-probabilities that share their first passes."""
