"""Multiply each group of rows by the matrix of the group, as a primitive."""
