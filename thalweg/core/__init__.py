"""Values and protocols that every room shares. No torch, no I/O; imports nothing of Thalweg outside `core`."""
