"""Proves that a plan equals the unsplit model: `weft.verify` and `weft verify`."""
