"""Kernels of a decode's chain beside the plain functions that they stand for, as `kernels_for_tests.py` does it."""

from __future__ import annotations

import interpreter_for_tests  # noqa: F401  # before Triton
import torch
from torch import Tensor

from weft.models.attention import RMSNorm
from weft.serve.attention import decode_attention_kernel, plain, prompt_attention_kernel, whole_attention_kernel
from weft.serve.attention.attend import add_up, takes_kernels
from weft.serve.attention.batch import PagedBatch, PageShare, angles_at, slots_of
from weft.serve.attention.decode_attention_kernel import add_up_by_kernel
from weft.serve.attention.plain import PlainPages, decode_attention
from weft.serve.attention.whole_attention_kernel import whole_attention_by_kernel
from weft.serve.head import sampling_kernel
from weft.serve.head.sampling import likeliest
from weft.serve.head.sampling_kernel import likeliest_by_kernel
from weft.serve.weights.steps import rotate_by_angles

BLOCK_SIZE = 4
LENGTHS = (1, 17, 50)  # of one part; with a new token that begins a tile; of several parts, if there are programs


def difference(one: Tensor, other: Tensor) -> float:
    return float((one.double() - other.double()).abs().max())


def whole() -> dict[str, dict[str, float]]:
    """Of a decode's attention in one kernel: heads, windows, norms, parts of a sequence. Controls: attention without
    the newest token, and queries that are not rotated.
    """
    found = {}
    whole_attention_kernel.TOKENS = 16
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies no matrices of bf16
        for (num_heads, num_key_heads, head_dim), window, num_programs, has_norms in (
            ((4, 2, 8), None, 1, False),
            ((3, 3, 20), 5, 1, True),
            ((2, 1, 16), None, 32, False),
            ((3, 1, 8), 21, 32, True),
        ):
            whole_attention_kernel._LAUNCH = (num_programs, 4, 128)
            sizes, lengths = (num_heads, num_key_heads, head_dim), torch.tensor(LENGTHS, dtype=torch.int32)
            tables = torch.randperm(48, dtype=torch.int32).reshape(3, 16)[:, :13]  # rows lie apart
            keys, values = (torch.randn(48 * BLOCK_SIZE, num_key_heads, head_dim).to(dtype) for _ in range(2))
            projected = torch.randn(3, (num_heads + 2 * num_key_heads) * head_dim).to(dtype)
            angles = torch.randn(max(LENGTHS), head_dim // 2).repeat(1, 2)
            rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
            norms = (RMSNorm(head_dim, 1e-6).to(dtype), RMSNorm(head_dim, 1e-2).to(dtype)) if has_norms else None
            for norm in norms or ():
                torch.nn.init.normal_(norm.weight)
            slots = slots_of(tables, 52, BLOCK_SIZE)[torch.arange(3), lengths - 1].long()
            given = (projected, sizes, norms, rotary, lengths - 1, slots)
            plain_keys, plain_values = keys.clone(), values.clone()
            turned = (projected, sizes, norms, angles_at(rotary, lengths - 1), slots)
            query = rotate_by_angles(*turned, plain_keys, plain_values)
            pages = (tables, lengths, BLOCK_SIZE, window)
            expected = decode_attention(query, plain_keys, plain_values, *pages)
            bare = projected.unflatten(-1, (-1, head_dim))[:, :num_heads]
            counts = torch.zeros(3 * num_key_heads, dtype=torch.int32)
            outs = [whole_attention_by_kernel(*given, keys, values, *pages, counts) for _ in range(2)]
            found[f"{dtype} {sizes} {window} {num_programs}"] = {
                "mixed": difference(outs[0], expected),
                "keys": difference(keys, plain_keys),
                "values": difference(values, plain_values),
                "again": difference(outs[0], outs[1]),
                "counts": float(counts.abs().max()),
                "not rotated": difference(outs[0], decode_attention(bare, plain_keys, plain_values, *pages)),
            }
    return found


def chosen_tokens() -> dict[str, dict[str, float]]:
    """Of the likeliest token: equal logits, infinite ones, and NaN."""
    found = {}
    sampling_kernel._ROW_TOKENS = 64
    logits = torch.randn(9, 300)[:, :250]
    logits[1], logits[3], logits[5, :249] = -torch.inf, 1.0, -torch.inf
    logits[2, 7], logits[6, 3], logits[4, [100, 200]], logits[7, [70, 71, 6]] = torch.nan, torch.inf, 9.0, 50.0
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        tokens = likeliest_by_kernel(logits.to(dtype))
        same = float((tokens != likeliest(logits.to(dtype))).sum())
        found[f"{dtype}"] = {"differ": same, "bad": float((tokens < 0).sum() - 1), "first": float(tokens[7] - 6)}
    return found


def shares() -> dict[str, dict[str, float]]:
    """Of decodes and prompts to the pages of each of three ranks, and the results of all together. Control: without the
    last rank.
    """
    found, page_size, degree = {}, 4, 3
    decode_attention_kernel.TOKENS = prompt_attention_kernel._TOKENS = 16
    for dtype, (num_heads, num_key_heads, head_dim), window, num_programs in (
        (torch.float32, (4, 2, 8), None, 1),
        (torch.float32, (3, 1, 20), None, 32),
        (torch.float16, (2, 2, 16), 9, 32),
    ):
        decode_attention_kernel._PROGRAMS = num_programs
        tables = torch.randperm(20, dtype=torch.int32).reshape(4, 5)
        queries, lengths = [7, 20], [1, 50, 19, 49]  # two decodes, and two prompts
        query = torch.randn(2 + sum(queries), num_heads, head_dim).to(dtype)
        whole = [torch.randn(20, degree, page_size, num_key_heads, head_dim).to(dtype) for _ in range(2)]
        given = (tables, torch.tensor(lengths, dtype=torch.int32), tables[:, 0])
        batch = PagedBatch(*[tables] * 3, *given, degree * page_size, 2, queries, lengths[2:])
        pages = PlainPages(*(one.flatten(1, 2).double() for one in whole))
        expected = pages.attend(query.double(), pages.keys, pages.values, batch, window)
        parts = torch.full((2, degree, len(query), num_heads, head_dim + 1), torch.nan)
        for index in range(degree):
            pages = PlainPages(*(one[:, index].contiguous() for one in whole))
            share = PageShare(index, degree, page_size)
            batch = PagedBatch(*[tables] * 3, *given, page_size, 2, queries, lengths[2:], share=share)
            parts[0, index] = pages.attend(query, pages.keys, pages.values, batch, window)
            plain.takes_kernels = lambda query: True  # as on a GPU
            parts[1, index] = pages.attend(query, pages.keys, pages.values, batch, window)
            plain.takes_kernels = takes_kernels
        found[f"{dtype} {num_heads} {num_key_heads} {head_dim} {window} {num_programs}"] = {
            "parts": difference(*parts.nan_to_num(nan=77, neginf=-9)),
            "added up": difference(*(add(parts[1], dtype) for add in (add_up, add_up_by_kernel))),
            "together": difference(add_up_by_kernel(parts[1], dtype), expected),
            "without a rank": difference(add_up_by_kernel(parts[1, :-1], dtype), expected),
        }
    return found


CASES = {"whole": whole, "chosen_tokens": chosen_tokens, "shares": shares}
