"""Fuzzers: `python -m tools.fuzz TARGET --minutes 60 --seed N`. CONTRIBUTING.md tells what each target checks."""
