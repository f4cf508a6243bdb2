"""Place replicas of experts on ranks, and choose which replica a token uses."""
