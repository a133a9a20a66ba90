"""Activations to FP8, one scale for each row and 128 channels."""
