"""Weft."""
