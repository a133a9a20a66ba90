"""Native sparse attention (NSA): attention to pooled blocks, to selected blocks and to a window, weighed by gates."""
