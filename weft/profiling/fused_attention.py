"""Attention whose values have another size than its queries, profiled as the kernel of a GPU computes it.

A profile runs on fake tensors of the CPU, for which torch has no fused kernel of such heads (latent attention): it
would count all scores as saved. In 16 bits a GPU takes cuDNN's kernel (seen on an H200 with heads of 192 and 128, torch
2.11), which saves what torch's memory-efficient kernel saves: queries, keys, values, results and a sum for each query.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.inspection.torch_patches import replaced


@contextmanager
def attention_of_a_gpu() -> Iterator[None]:
    """Inside the context, such attention on fake tensors is one operation."""
    plain = F.scaled_dot_product_attention

    def attend(query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        is_half = query.dtype in (torch.bfloat16, torch.float16)
        if args or not is_half or query.shape[-1] == value.shape[-1] or query.shape[1] != key.shape[1]:
            return plain(query, key, value, *args, **kwargs)
        if kwargs.get("attn_mask") is not None:
            return plain(query, key, value, **kwargs)
        dropout, is_causal, scale = (kwargs.get(name) for name in ("dropout_p", "is_causal", "scale"))
        compute = torch.ops.aten._scaled_dot_product_efficient_attention
        result: Tensor = compute(query, key, value, None, True, dropout or 0.0, bool(is_causal), scale=scale)[0]
        return result

    with replaced(F, "scaled_dot_product_attention", attend):
        yield
