"""Expert routing."""
