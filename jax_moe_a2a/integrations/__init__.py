"""Offer the exchange with the interfaces of other code bases, one module for each.

``grug`` (Marin), ``maxtext`` and ``sglang_jax`` need only JAX. ``nnx`` and ``linen`` need Flax.
This package imports none of these modules itself.
"""
