"""Serves a trained model: requests in, tokens out."""
