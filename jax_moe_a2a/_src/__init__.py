"""Implement the package. Import public names from ``jax_moe_a2a``: these modules may change."""
