"""Dispatch of rows to other ranks of a host, and the combination of their results."""
