"""Instruments: load generator, one-batch timing, comparison with transformers, held-out tasks and evaluation."""
