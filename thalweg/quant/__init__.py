"""Quantization schemes, one per file: how a checkpoint stores a weight, how memory holds it, and what multiplies by
it.
"""
