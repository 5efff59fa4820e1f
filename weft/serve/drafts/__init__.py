"""Drafters for speculative decoding: by lookup, by the model's own first layers, by a smaller model."""
