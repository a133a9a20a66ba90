"""Products with weights of 4-bit or 8-bit codes and activations of 16 bits."""
