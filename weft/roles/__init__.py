"""Ranks that do not train: how training ranks reach them, and the queues between them."""
