"""bf16 products of some dozen rows with weights that fill the machine."""
