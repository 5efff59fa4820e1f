"""Inspects a model: its blocks, how its layers can be split, and the bytes that its operations read and write.

Models are run on fake tensors everywhere, so torch's grouped matmul gets a shape on those of every floating-point type
here. torch computes grouped matmuls in float32, float16 and bfloat16, but on fake tensors it refuses all but bfloat16
(torch 2.11 and 2.13), and float64 everywhere. A forward on fake tensors needs no more than shapes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses import fake_impls

_OPERATION = torch.ops.aten._grouped_mm.default


def _fake_grouped(
    mode: Any, _: Any, left: Tensor, right: Tensor, offs: Tensor | None = None, *__: Any, **___: Any
) -> Any:
    """Returns the result as a fake tensor. Its rows start at multiples of 16 bytes.

    A matrix [rows, in] by matrices [groups, in, out] is [rows, out]. Two matrices, whose inner dim is divided into
    groups, or two batches of matrices give a batch of products.
    """
    rows, columns, aligned = left.shape[-2], right.shape[-1], 16 // left.element_size()
    width = -(-columns // aligned) * aligned
    with mode:
        if left.dim() != right.dim():
            return left.new_empty_strided((rows, columns), (width, 1))
        num_groups = len(left) if left.dim() == 3 or offs is None else len(offs)
        return left.new_empty_strided((num_groups, rows, columns), (rows * width, width, 1))


if _OPERATION not in fake_impls.op_implementations_dict:
    fake_impls.register_op_impl(_OPERATION)(_fake_grouped)
