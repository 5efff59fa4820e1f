"""Inspects a model: its blocks, how its layers can be split, and the bytes that its operations read and write."""

from __future__ import annotations

from weft.inspection import fake_grouped_matmul  # noqa: F401 (models are run on fake tensors everywhere)
