"""Build MoE layers from the exchange of tokens and the grouped product."""
