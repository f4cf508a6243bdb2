"""Compute destinations of tokens and numbers of rows from expert ids, and estimate memory."""
