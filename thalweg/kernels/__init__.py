"""One folder per operation: the reference in plain torch, its cases, and the fast backends beside them."""
