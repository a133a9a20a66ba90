"""What penalties, biases, minimum lengths and grammars change in the logits."""
