"""What tokens are drawn from, as logits: by temperature and truncation; and the race that draws of it, where the rule
needs more than its winner.
"""
