"""Keys and values of latents."""
