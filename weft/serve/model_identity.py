"""A text that tells models apart: files made for one model are refused by another."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def model_identity(model: nn.Module) -> str:
    """A hash of a model's config and of its vectors (norms and biases), in bf16: the same in any dtype and format."""
    found = hashlib.sha256(repr(getattr(model, "config", "")).encode())
    for name, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            values = parameter.detach().to("cpu", torch.bfloat16).contiguous().view(torch.int16)
            found.update(name.encode() + values.numpy().tobytes())
    return found.hexdigest()
