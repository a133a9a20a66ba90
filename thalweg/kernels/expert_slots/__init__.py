"""Where the chosen experts of tokens are."""
