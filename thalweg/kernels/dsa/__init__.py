"""Sparse attention (DSA): index keys, their scores, the choice of the highest, attention to what was chosen."""
