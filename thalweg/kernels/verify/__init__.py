"""Inputs of a step that verifies trees, and the update of its slots."""
