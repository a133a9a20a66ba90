"""What a step that verifies trees needs of its slots, and what becomes of these."""
