"""Define primitives that apply experts to their rows: two products around an activation."""
