"""Docs made from committed results, and the gate before a release."""
