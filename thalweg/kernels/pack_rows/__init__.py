"""Rows of several tensors as the bytes of one, which one collective moves, and back."""
