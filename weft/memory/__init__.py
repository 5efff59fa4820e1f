"""Memory policies: recompute, activations and weights on the host, pruned state."""
