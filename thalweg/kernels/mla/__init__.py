"""Multi-head latent attention, absorbed and decompressed."""
