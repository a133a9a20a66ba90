"""Drafters: what guesses the tokens that come next, so that a step may verify several at once."""
