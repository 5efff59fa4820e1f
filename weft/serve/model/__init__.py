"""The model over pages, as a rank computes its part of a step."""
