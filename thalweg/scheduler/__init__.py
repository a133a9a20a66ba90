"""The brain of a rank: which request computes what in which step. Pure Python bookkeeping, no torch, no I/O."""
