"""Operations that build a draft tree, between the passes of its draft head."""
