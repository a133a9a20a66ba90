"""Rows from token order to expert order and back."""
