"""Tensors in nested values of kinds that models return: each is found once, and replaced wherever it can be read."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.modeling_outputs import CausalLMOutput

from weft.inspection.nested_tensors import map_tensors, tensors_in


class OwnDict(dict[str, Any]):
    """A dict of a class that torch does not know."""


@dataclass(frozen=True)
class Frozen:
    logits: Tensor
    note: str = "kept"


Pair = namedtuple("Pair", ["logits", "others"])


def one() -> Tensor:
    return torch.ones(1)


@pytest.mark.parametrize(
    ("value", "reads"),
    [
        (CausalLMOutput(logits=one()), [lambda v: v.logits, lambda v: v["logits"], lambda v: v[0]]),
        (OwnDict(logits=one()), [lambda v: v["logits"]]),
        (UserDict(logits=one()), [lambda v: v["logits"], lambda v: v.data["logits"]]),
        (OrderedDict(logits=one()), [lambda v: v["logits"]]),
        (defaultdict(list, logits=[one()]), [lambda v: v["logits"][0]]),
        (Frozen(one()), [lambda v: v.logits]),
        (Pair(one(), None), [lambda v: v.logits, lambda v: v[0]]),
        ({"inside": [(Frozen(one()), 3)]}, [lambda v: v["inside"][0][0].logits]),
    ],
)
def test_each_tensor_is_found_once_and_replaced_everywhere(value: Any, reads: list[Any]) -> None:
    assert len(tensors_in(value)) == 1
    made = map_tensors(lambda tensor: tensor * 2, value)
    assert type(made) is type(value)
    assert [read(made).item() for read in reads] == [2.0] * len(reads)
    assert [read(value).item() for read in reads] == [1.0] * len(reads)
