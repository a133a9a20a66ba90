"""The sum over ranks, added to the residual stream and normed."""
