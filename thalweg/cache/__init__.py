"""Page allocator and prefix cache. Pure Python, no torch."""
