"""The exchange primitives, with argument checks, rules of JAX transformations, and both paths."""
