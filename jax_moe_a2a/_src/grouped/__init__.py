"""Define the grouped product, which multiplies each group of rows by the matrix of the group."""
