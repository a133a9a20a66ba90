"""A and B of a step on one device."""
