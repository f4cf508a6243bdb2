"""Token formats: values of 4 or 8 bits, with a scale for each group."""
