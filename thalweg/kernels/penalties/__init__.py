"""Edits of the logits by penalties, biases, minimum lengths and grammars."""
