"""Scores of DSA's lightning indexer."""
