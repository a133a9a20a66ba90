"""One quantization scheme per file: how a checkpoint's tensors become weights."""
