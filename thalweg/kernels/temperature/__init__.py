"""Logits that tokens are sampled from, after temperature and truncation; and Gumbel noise on scores."""
