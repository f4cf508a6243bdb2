"""Define the token formats: narrow values with a scale for each group."""
