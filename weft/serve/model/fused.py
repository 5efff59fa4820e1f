"""Steps of a block, joined where memory is read less often for it. GPUs run the kernels of `fused_kernel.py`.

The plain functions run on a CPU, in other dtypes than fp16 and bf16, and for LayerNorm.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.models.attention import RMSNorm
from weft.models.router import Router
from weft.serve.attention.batch import PagedBatch, angles_at
from weft.serve.attention.layer_cache import MAX_WHOLE_DECODES
from weft.serve.weights.cpu_products import is_vector, plain_linear
from weft.serve.weights.packed_linear import PackedLinear
from weft.serve.weights.plain_norm import plain_norm
from weft.serve.weights.weight_formats import FEW_ROWS

Rotary = tuple[Tensor, Tensor]


def _has_kernels(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype in (torch.float16, torch.bfloat16)


def normed(hidden: Tensor, norm: nn.Module) -> Tensor:
    """The norm of hidden states [tokens, hidden]."""
    if isinstance(norm, RMSNorm) and _has_kernels(hidden):
        from weft.serve.model.fused_kernel import norm_by_kernel

        return norm_by_kernel(hidden, norm.weight, norm.eps)
    return plain_norm(hidden, norm)


def product(hidden: Tensor, layer: nn.Linear) -> Tensor:
    """hidden @ weight.T, without the layer's bias."""
    return layer.product(hidden) if isinstance(layer, PackedLinear) else plain_linear(hidden, layer, None)


def linear(hidden: Tensor, layer: nn.Linear) -> Tensor:
    """layer(hidden) of [tokens, in], with the updates of the tokens' adapters if the layer has `updates`."""
    out = layer(hidden) if isinstance(layer, PackedLinear) else plain_linear(hidden, layer, layer.bias)
    updates = getattr(layer, "updates", None)
    added = None if updates is None else updates.of(hidden)
    return out if added is None else out + added


def norm_linear(hidden: Tensor, norm: nn.Module, layer: nn.Linear, is_gated: bool = False) -> Tensor:
    """layer(norm(hidden)) of [tokens, in]. If `is_gated`, silu(gate) * up of its result, which has both end to end."""
    if isinstance(layer, PackedLinear):
        if isinstance(norm, RMSNorm) and hidden.shape[0] <= FEW_ROWS:
            return layer.fused(hidden, is_gated=is_gated, norm=norm)
        return layer.fused(normed(hidden, norm), is_gated=is_gated)
    if hasattr(layer, "updates"):
        out = linear(normed(hidden, norm), layer)
        return gated(out) if is_gated else out
    if len(hidden) == 1 and isinstance(norm, RMSNorm) and _has_kernels(hidden):
        from weft.serve.model.fused_kernel import row_linear_by_kernel

        return row_linear_by_kernel(hidden, layer.weight, layer.bias, norm=norm, is_gated=is_gated)
    out = plain_linear(normed(hidden, norm), layer, layer.bias)
    return gated(out) if is_gated else out


def add_linear(residual: Tensor, hidden: Tensor, layer: nn.Linear) -> Tensor:
    """residual + layer(hidden). The residual may be overwritten."""
    if isinstance(layer, PackedLinear):
        return layer.fused(hidden, residual)
    if hasattr(layer, "updates"):
        return residual + linear(hidden, layer)
    if len(hidden) == 1 and _has_kernels(hidden):
        from weft.serve.model.fused_kernel import row_linear_by_kernel

        return row_linear_by_kernel(hidden, layer.weight, layer.bias, residual)
    if layer.bias is None:
        if is_vector(hidden, layer):
            return plain_linear(hidden, layer, residual[0])
        return residual.addmm_(hidden, layer.weight.T)
    return residual + plain_linear(hidden, layer, layer.bias)


def gated(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of [tokens, gate and up end to end]."""
    if _has_kernels(gate_up):
        from weft.serve.model.fused_kernel import gated_by_kernel

        return gated_by_kernel(gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def routed(hidden: Tensor, norm: nn.Module, router: Router) -> tuple[Tensor, Tensor, Tensor]:
    """norm(hidden) of [tokens, hidden], and what a router gives for it: weights and experts [tokens, k]."""
    if isinstance(norm, RMSNorm) and _has_kernels(hidden):
        from weft.serve.weights.router_kernel import can_route, route_by_kernel

        if can_route(len(hidden), router):
            return route_by_kernel(hidden, norm, router)
    given = normed(hidden, norm)
    weights, experts = router(given[None])
    return given, weights, experts


def rotate_and_store(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: Rotary | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """From q, k, v end to end [tokens, ...]: norms of q and k heads, rotation by position; k and v go to their slots.

    `sizes` are the numbers of heads and key heads, and head_dim. `rotary` has cos and sin of all positions. Returns the
    queries [tokens, heads, head_dim].
    """
    if _has_kernels(projected) and rotary is not None:
        from weft.serve.model.fused_kernel import rotate_and_store_by_kernel

        return rotate_and_store_by_kernel(projected, sizes, norms, rotary, positions, slots, keys, values)
    angles = None if rotary is None else angles_at(rotary, positions)
    return rotate_by_angles(projected, sizes, norms, angles, slots, keys, values)


def rotate_by_angles(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    angles: Rotary | None,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
) -> Tensor:
    """`rotate_and_store` as plain functions, with the tokens' angles (`angles_at`)."""
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


def is_for_whole_kernel(projected: Tensor, batch: PagedBatch) -> bool:
    """Is this a step of few decodes alone on a GPU, whose attention is one kernel?"""
    is_decodes = batch.tiles is None and batch.num_decodes == len(projected) <= MAX_WHOLE_DECODES
    return is_decodes and _has_kernels(projected)


def whole_attention(
    projected: Tensor,
    sizes: tuple[int, int, int],
    norms: tuple[RMSNorm, RMSNorm] | None,
    rotary: Rotary | None,
    positions: Tensor,
    slots: Tensor,
    keys: Tensor,
    values: Tensor,
    batch: PagedBatch,
    window: int | None,
    counts: Tensor,
) -> Tensor:
    """`rotate_and_store`, and the attention of its queries, of decodes alone: [tokens, heads, head_dim]."""
    from weft.serve.attention.whole_attention_kernel import whole_attention_by_kernel

    assert rotary is not None, "models without rotary positions have no such kernel"
    pages = (keys, values, batch.tables, batch.lengths, batch.block_size, window)
    return whole_attention_by_kernel(projected, sizes, norms, rotary, positions, slots, *pages, counts)
