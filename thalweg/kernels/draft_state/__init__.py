"""What drafting by a head does between the head's own computations."""
