"""Define groups of ranks, and manage their processes, memory and compiled extension."""
