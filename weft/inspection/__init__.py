"""Inspects a model: its blocks, how its layers can be split, and the bytes that its operations read and write."""
