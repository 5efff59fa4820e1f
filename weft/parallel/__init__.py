"""Applies a plan to a model: one file or folder per axis, and the parameters and state of a split model."""
