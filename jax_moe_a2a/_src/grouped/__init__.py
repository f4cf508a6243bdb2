"""Define the grouped product, which multiplies each group of rows by its own matrix."""
