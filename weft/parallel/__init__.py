"""Applies a plan to a model: one file or folder per axis, and the state of a model that is split."""
