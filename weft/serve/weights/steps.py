"""The steps of a block: the plain functions that kernels equal, and products with quantised weights by the kernel that
was chosen for them (`fast_path.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.weights.fast_path import Kernel
from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat

WITH_NORM = ("row", "token", "few rows")  # kernels that compute the RMSNorm before a product


class AfterProduct(NamedTuple):
    """What follows a product: out + bias; then silu(gate) * up of both end to end, or residual + out."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    is_gated: bool = False

    def of(self, out: Tensor) -> Tensor:
        out = out if self.bias is None else out + self.bias
        out = plain_gate(out) if self.is_gated else out
        return out if self.residual is None else self.residual + out


def plain_gate(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up of [tokens, gate and up end to end]."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def plain_norm(hidden: Tensor, norm: RMSNorm) -> Tensor:
    """Return norm(hidden) of hidden states [tokens, hidden] in 32 or 64 bits. For few rows on a CPU, calls take longer
    than the numbers, so there are few.
    """
    length = torch.linalg.vector_norm(hidden, 2, -1, True)
    mean = torch.addcmul(_tensor(norm.eps, hidden.dtype), length, length, value=1 / hidden.shape[-1])
    return (hidden * mean.rsqrt_()).mul_(norm.weight)


def rotate_by_angles(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    angles: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """From q, k, v end to end [tokens, ...], compute the norms of q and k heads and rotate these by the tokens' angles.
    k and v go to their slots. `sizes` are the numbers of heads and key heads, and head_dim. Return the queries [tokens,
    heads, head_dim].
    """
    num_heads, num_key_heads, head_dim = sizes
    heads = projected.view(projected.shape[0], -1, head_dim)  # [tokens, all heads, head_dim]
    both: Tensor
    both, value = heads.split([num_heads + num_key_heads, num_key_heads], dim=1)
    if norms is not None:
        both = torch.cat([norms[0](both[:, :num_heads]), norms[1](both[:, num_heads:])], dim=1)
    if angles is not None:
        cos, sin = angles
        both = torch.addcmul(both * cos, both.roll(head_dim // 2, -1), sin)
    keys.index_copy_(0, slots, both[:, num_heads:])
    values.index_copy_(0, slots, value)
    return both[:, :num_heads]


@cache
def _tensor(value: float, dtype: torch.dtype) -> Tensor:
    return torch.tensor(value, dtype=dtype)


def quantised_product(
    kernel: Kernel,
    form: WeightFormat,
    hidden: Tensor,
    parts: Sequence[Tensor],
    after: AfterProduct,
    norm: RMSNorm | None = None,
) -> Tensor:
    """Return norm(hidden) [rows, in] @ weight.T, and what follows. Only kernels WITH_NORM take a norm. The owner of a
    weight multiplies with "codes", which are arranged for a CPU.
    """
    if kernel == "dequantise":
        return after.of(form.product(hidden, parts))
    assert isinstance(form, Grouped | RowFp8), "kernels of GPUs take no others"
    if kernel == "float8":
        assert isinstance(form, RowFp8)
        return after.of(form.float8_product(hidden, parts))
    given = (hidden, *form.kernel_parts(parts), form.block(hidden.shape[-1]), after)
    if kernel == "token":
        from weft.serve.weights.packed_token_kernel import product_of_token_by_kernel

        return product_of_token_by_kernel(*given, norm)
    if kernel == "few rows":
        from weft.serve.weights.packed_row_kernel import product_of_rows_by_kernel

        return product_of_rows_by_kernel(*given, norm)
    from weft.serve.weights.packed_product_kernel import packed_product_by_kernel

    assert kernel == "tiles"
    return packed_product_by_kernel(*given)
