"""A text that tells models apart: files made for one model are refused by another.

It is a hash of the config, and a sum over all numbers in vectors (norms and biases), each of which is hashed with its
place. So ranks that hold parts of a model add up what they hold, and find the same text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weft.inspection.parameter_cut import Cut

MODULUS = 1 << 64


def model_identity(
    model: nn.Module, cuts: Mapping[str, Cut] | None = None, add_up: Callable[[int], int] = lambda number: number
) -> str:
    """The identity of a model, the same in any dtype and format.

    With `cuts`, `model` is a rank's part, and `add_up` gives the sum (modulo 2^64) of what its ranks give.
    """
    total = 0
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            cut = Cut.whole(parameter.shape) if cuts is None else cuts[name]
            if cut.is_first:  # others have the same part
                places = np.concatenate([np.arange(*one, dtype=np.uint64) for one in cut.intervals[0]])
                total += _sum_of_hashes(name, parameter.detach(), places)
    config = repr(getattr(model, "config", ""))
    return hashlib.sha256(f"{config} {add_up(total % MODULUS)}".encode()).hexdigest()


def _sum_of_hashes(name: str, values: torch.Tensor, places: NDArray[np.uint64]) -> int:
    """The sum of hashes of a vector's numbers in bf16, each with its name and place."""
    bits = values.to("cpu", torch.bfloat16).contiguous().view(torch.int16).numpy().astype(np.uint64)
    seed = np.uint64(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little"))
    mixed = _mixed(_mixed(seed + places) + bits)
    return int(np.sum(mixed, dtype=np.uint64))


def _mixed(numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Numbers of 64 bits in place of others, as splitmix64 does it."""
    numbers = (numbers ^ (numbers >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    numbers = (numbers ^ (numbers >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return numbers ^ (numbers >> np.uint64(31))
