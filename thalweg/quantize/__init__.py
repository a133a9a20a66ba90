"""`thalweg quantize`: writes a checkpoint in another published format."""
