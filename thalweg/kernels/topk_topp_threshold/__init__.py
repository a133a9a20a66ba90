"""The most likely ids of a row without a sort: what truncation and log-probabilities share."""
