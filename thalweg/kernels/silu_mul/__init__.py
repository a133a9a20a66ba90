"""silu(gate) · up, as bf16 or as FP8 codes."""
