"""Apply experts to their rows: two grouped products around an activation, as primitives."""
