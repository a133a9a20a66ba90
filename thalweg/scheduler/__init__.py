"""Plans steps and commits results: which request computes which tokens. No torch, no I/O."""
