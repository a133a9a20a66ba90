"""Which page holds what: the books of page leases and the prefix cache over them. Pure Python, no torch."""
