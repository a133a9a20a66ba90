"""Latents that a step attends to, from host memory into the hot set of their request."""
