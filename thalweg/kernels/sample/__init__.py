"""Drawing a token of each row."""
