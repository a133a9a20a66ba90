"""Inputs of a decode step, gathered from its slots."""
