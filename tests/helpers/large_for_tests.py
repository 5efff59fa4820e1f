"""Triton's kernels on a GPU, over tensors of more than 2^31 elements: the last rows beside the plain functions.

Run as a program, `python large_for_tests.py`: prints, as JSON, what the two differ by. It needs 40 GB of the GPU.
"""

from __future__ import annotations

import gc
import json

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.models.decoder import RMSNorm
from weft.models.loss import rows_loss
from weft.models.loss_kernel import rows_loss_by_kernel
from weft.models.vision.pool_kernel import kernel_pools
from weft.optim.update import update
from weft.optim.update_kernel import update_by_kernel
from weft.serve.attention.batch import tiles_of
from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel
from weft.serve.attention.plain import decode_attention, prompt_attention_by_tiles
from weft.serve.attention.prompt_attention_kernel import prompt_attention_by_kernel
from weft.serve.head.sampling_kernel import draw_by_kernel
from weft.serve.model.fused_kernel import (
    gated_by_kernel,
    norm_by_kernel,
    rotate_and_store_by_kernel,
    row_linear_by_kernel,
)
from weft.serve.weights.group_codes import joined_ranges
from weft.serve.weights.packed_product_kernel import packed_product_by_kernel
from weft.serve.weights.packed_row_kernel import product_of_rows_by_kernel
from weft.serve.weights.packed_token_kernel import product_of_token_by_kernel
from weft.serve.weights.weight_formats import Grouped
from weft.sharding.gradient_kernel import copy_with_squares

MANY = 2**31 + 2**16
CONSTANTS = torch.tensor([1 - 1e-3, 0.1, 0.95, 0.05, 1e-8, 1e-2, 0.5], dtype=torch.float64)
TAIL = 8192
Found = dict[str, float]


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, of the largest number."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def random_rows(width: int) -> Tensor:
    """Random numbers in bf16 [rows, width], more than 2^31 of them."""
    return torch.empty(MANY // width + 1, width, dtype=torch.bfloat16, device="cuda").normal_()


def losses() -> Found:
    logits = random_rows(131072)
    labels = torch.randint(131072, (len(logits),), device="cuda")
    own = logits[-4:].clone()
    expected = rows_loss(own, labels[-4:], 1e-4, True)
    before = logits[:-4].clone()
    total = rows_loss_by_kernel(logits, labels, 1e-4, True)
    rest = rows_loss_by_kernel(before, labels[:-4], 1e-4, True)
    return {"rows": difference(logits[-4:], own), "total": difference(total - rest, expected) / 100}


def takes() -> Found:
    gradient = random_rows(1)[:, 0]
    target = torch.empty_like(gradient)
    squares = copy_with_squares(gradient, target)
    parts = sum(part.double().square().sum() for part in gradient.split(2**28))
    assert isinstance(parts, Tensor)
    return {
        "target": difference(target[-TAIL:], gradient[-TAIL:]),
        "squares": difference(squares.sum(dtype=torch.float64), parts),
    }


def updates() -> Found:
    weight, first, second = (torch.rand(MANY, device="cuda") for _ in range(3))
    gradient = torch.empty(MANY, dtype=torch.bfloat16, device="cuda").normal_()
    more = (torch.tensor(0.5, dtype=torch.float64, device="cuda"), CONSTANTS.cuda(), torch.tensor(7, device="cuda"))
    own = [one[-TAIL:].clone() for one in (weight, first, second)]
    update(own[0], gradient[-TAIL:], (own[1], own[2]), None, *more)
    update_by_kernel(weight, gradient, (first, second), None, *more)
    both = zip((weight, first, second), own, strict=True)
    return {str(i): difference(whole[-TAIL:], plain) for i, (whole, plain) in enumerate(both)}


def pools() -> Found:
    images = torch.empty(1, 208, 3300, 3300, dtype=torch.bfloat16, device="cuda").to(memory_format=torch.channels_last)
    images.normal_()
    mine = kernel_pools()[F.max_pool2d](images, 3, 1, 1)
    return {
        "corner": difference(mine[..., -5:, -5:], F.max_pool2d(images[..., -6:, -6:].float(), 3, 1, 1)[..., 1:, 1:])
    }


def between_matmuls() -> Found:
    hidden, norm = random_rows(4096), RMSNorm(4096, 1e-6).to("cuda", torch.bfloat16)
    of_norm = difference(norm_by_kernel(hidden, norm.weight, 1e-6)[-4:], norm(hidden[-4:]))
    gate, up = hidden[-4:].float().chunk(2, dim=-1)
    of_gate = difference(gated_by_kernel(hidden)[-4:], F.silu(gate) * up)
    row = hidden[:1].clone()
    of_row = difference(row_linear_by_kernel(row, hidden, None)[:, -64:], row.float() @ hidden[-64:].float().T)
    return {"norm": of_norm, "gated": of_gate, "row": of_row}


def packed() -> Found:
    form, num_in = Grouped(4, 64), 16384
    num_out = MANY * 2 // num_in + 16
    codes = torch.randint(0, 256, (num_out, num_in // 2), dtype=torch.uint8, device="cuda")
    scale, least = (torch.rand(num_out, num_in // 64, device="cuda").half() for _ in range(2))
    hidden = torch.randn(2, num_in, device="cuda").bfloat16()
    ranges = joined_ranges(scale, least)
    expected = hidden.double() @ form.dequantise((codes[-64:], ranges[-64:]), torch.float64).T
    given = (hidden, codes, ranges, form.block(num_in))
    of_token = product_of_token_by_kernel(hidden[:1], *given[1:])
    return {
        "one token": difference(of_token[:, -64:], expected[:1]),
        "some rows": difference(packed_product_by_kernel(*given)[:, -64:], expected),
        "few rows": difference(product_of_rows_by_kernel(*given)[:, -64:], expected),
    }


def caches() -> Found:
    """Keys and values in the last blocks of a cache."""
    keys, values = (random_rows(1024).view(-1, 8, 128) for _ in range(2))
    num_blocks = len(keys) // 16
    tables = torch.arange(num_blocks - 8, num_blocks, dtype=torch.int32, device="cuda").view(2, 4)
    lengths = torch.tensor([64, 50], dtype=torch.int32, device="cuda")
    query = torch.randn(2, 32, 128, device="cuda").bfloat16()
    given = (query, keys, values, tables, lengths, 16, None)
    of_decode = difference(decode_attention_by_kernel(*given), decode_attention(*given))
    query = torch.randn(20, 32, 128, device="cuda").bfloat16()
    tiles = torch.tensor(tiles_of([20], [50], first_row=1), dtype=torch.int32, device="cuda").T.contiguous()
    outs = [torch.zeros_like(query) for _ in range(2)]
    for attend, out in zip((prompt_attention_by_kernel, prompt_attention_by_tiles), outs, strict=True):
        attend(query, keys, values, tables, tiles, 16, None, out)
    projected = torch.randn(2, 48 * 128, device="cuda").bfloat16()
    rotary = (torch.ones(4, 128, device="cuda").bfloat16(), torch.zeros(4, 128, device="cuda").bfloat16())
    slots = torch.tensor([len(keys) - 1, len(keys) - 9], device="cuda")
    positions = torch.tensor([1, 2], device="cuda")
    rotate_and_store_by_kernel(projected, (32, 8, 128), None, rotary, positions, slots, keys, values)
    given_keys, given_values = projected.view(2, 48, 128)[:, 32:40], projected.view(2, 48, 128)[:, 40:]
    stored = {"keys": difference(keys[slots], given_keys), "values": difference(values[slots], given_values)}
    return {"decode": of_decode, "prompt": difference(*outs), **stored}


def draws() -> Found:
    logits = random_rows(131072)
    num_requests = len(logits)
    keys = torch.randint(-(2**31), 2**31, (num_requests, 2), device="cuda").int()
    temperature, positions = torch.ones(num_requests, 1, device="cuda"), torch.arange(num_requests, device="cuda")
    whole = draw_by_kernel(logits, temperature, keys, positions)
    tail = draw_by_kernel(logits[-8:].clone(), temperature[-8:], keys[-8:], positions[-8:])
    return {"draws": float((whole[-8:] != tail).sum())}


if __name__ == "__main__":
    torch.manual_seed(0)
    answer = {}
    with torch.no_grad():
        for case in (losses, takes, updates, pools, between_matmuls, packed, caches, draws):
            answer[case.__name__] = case()
            gc.collect()
            torch.cuda.empty_cache()
    print(json.dumps(answer))
