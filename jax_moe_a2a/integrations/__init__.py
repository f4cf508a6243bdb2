"""The exchange with the interfaces of other code bases, one module for each.

``grug`` (Marin), ``maxtext`` and ``sglang_jax`` need only JAX. ``nnx`` and ``linen`` need Flax, and
are imported only if a program imports them.
"""
