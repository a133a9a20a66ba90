"""Runs a step on one device: forward, then sample and draft. CUDA graphs."""
