"""What attention layers share in a step: contexts, masks, tiles, and the indexer's choice."""
