"""What the user wishes (one tree of frozen dataclasses, which is also the command line), what the model is, what the
machine has. No torch.
"""
