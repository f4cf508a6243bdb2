"""Place replicas of experts on ranks, and choose a replica for each choice of a token."""
