"""Layers of models: linear, norm, rotary, embedding, MLA, GQA, the indexer, MLPs."""
