"""What tokens are drawn from, as logits, by temperature and truncation; and Gumbel noise on scores."""
