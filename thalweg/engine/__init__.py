"""The loop, its worker, channels and the engine process."""
