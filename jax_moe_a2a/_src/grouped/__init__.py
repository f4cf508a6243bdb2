"""Multiply each group of rows by a matrix of its own, as a primitive."""
