"""Operations of a draft head between its passes."""
