"""Define the primitives of the exchange: checks, binding, rules of transforms, and both paths."""
