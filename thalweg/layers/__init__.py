"""What models are made of: linear, norm, rotary, embedding, MLA, GQA, the indexer, MLPs."""
