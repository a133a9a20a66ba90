"""Products whose rows do not depend on one another: deterministic mode's."""
