"""FP8 weights with block scales."""
