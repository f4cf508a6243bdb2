"""Place replicas of experts on ranks, and choose the replica that a token uses."""
