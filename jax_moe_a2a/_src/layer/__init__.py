"""Build parts of MoE layers from the exchange and the grouped product."""
