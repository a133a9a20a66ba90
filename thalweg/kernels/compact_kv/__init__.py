"""Rows of many planes from place to place: the entries of drafts that were accepted."""
