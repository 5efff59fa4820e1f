"""Generates text with a trained model."""
