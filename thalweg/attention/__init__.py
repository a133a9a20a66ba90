"""Attention metadata of a step, and the selection of context under sparse attention."""
