"""What growing a tree of drafts does between the computations of its head."""
