"""From logits to tokens: penalties, truncation, random numbers, acceptance, log-probabilities."""
