"""Rows between the ranks of a host, and their results back."""
