"""From a stream of named tensors into a model's parameters, by a table, with strict accounting."""
