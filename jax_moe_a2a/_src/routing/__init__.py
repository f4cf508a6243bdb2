"""Define the routing that dispatch and combine share."""
