"""The implementation. Import public names from ``jax_moe_a2a``; anything else here may change."""
