"""Compute from ids the destination of each token and the number of rows, and estimate memory."""
