"""From a stream of named tensors into a model's parameters, by a table, with every tensor and parameter accounted
for.
"""
