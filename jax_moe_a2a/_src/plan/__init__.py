"""Compute from ids where each token goes, how many rows arrive, and how much memory they need."""
