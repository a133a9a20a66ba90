"""What the attentions of all models share."""
