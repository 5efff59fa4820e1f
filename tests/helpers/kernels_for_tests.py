"""Triton's kernels beside the plain functions that they stand for, on a CPU by Triton's interpreter.

`kernel_programs_for_tests.py` runs the functions of CASES in a process with the interpreter.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import interpreter_for_tests  # noqa: F401  # before Triton
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from attention_for_tests import decodes_of, loki_of, pages_of
from torch import Tensor

from weft.models import loss_kernel, row_kernel, row_operations
from weft.models.decoder import RMSNorm
from weft.models.expert_rows import fill_slots, sort_by_expert
from weft.models.loss import IGNORE, rows_loss
from weft.models.vision.pool_kernel import kernel_pools
from weft.optim import update_kernel
from weft.optim.update import update
from weft.optim.update_kernel import update_by_kernel
from weft.serve.attention import (
    decode_attention_kernel,
    four_bit_append_kernel,
    four_bit_attention_kernel,
    loki_kernel,
    prompt_attention_kernel,
)
from weft.serve.attention.batch import CacheSizes, PagedBatch, angles_at, slots_of, tiles_of
from weft.serve.attention.choice import LokiChoice, LokiPages, chosen_tokens
from weft.serve.attention.decode_attention_kernel import decode_attention_by_kernel
from weft.serve.attention.four_bit_attention_kernel import four_bit_attention_by_kernel
from weft.serve.attention.four_bits import FourBitPages
from weft.serve.attention.loki_kernel import chosen_slots_by_kernel
from weft.serve.attention.plain import PlainStorage, decode_attention, prompt_attention_by_tiles
from weft.serve.attention.prompt_attention_kernel import prompt_attention_by_kernel
from weft.serve.head import sampling_kernel
from weft.serve.head.sampling import _settings_of, draw, filtered_draw_by_sorting
from weft.serve.model.fused_kernel import (
    gated_by_kernel,
    norm_by_kernel,
    rotate_and_store_by_kernel,
    row_linear_by_kernel,
)
from weft.serve.model.linear import PlainLinear
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest
from weft.serve.weights import packed_product_kernel, packed_row_kernel
from weft.serve.weights.fast_path import FEW_ROWS, NOWHERE
from weft.serve.weights.group_codes import group_range
from weft.serve.weights.packed_product_kernel import packed_product_by_kernel
from weft.serve.weights.packed_row_kernel import product_of_rows_by_kernel
from weft.serve.weights.packed_token_kernel import TokenLaunch, product_of_token_by_kernel
from weft.serve.weights.steps import AfterProduct, plain_gate, rotate_by_angles
from weft.serve.weights.weight_formats import Grouped, RowFp8, WeightFormat, weight_format
from weft.sharding import gradient_kernel as take_kernel
from weft.sharding.gradient_kernel import copy_with_squares

NUMBERS = torch.tensor([1 - 1e-3, 0.1, 0.95, 0.05, 1e-8, 1e-2, 0.5], dtype=torch.float64)
FORMATS = {
    "fp32": (torch.float32, torch.float32),
    "fp32 bf16": (torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp32 int8": (torch.float32, None),
    "bf16 int8": (torch.bfloat16, None),
}


def difference(one: Tensor, other: Tensor) -> float:
    """The largest, of the largest number."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max().clamp(min=1e-30))


def updates() -> dict[str, dict[str, float]]:
    """Of weights, state and what is written beside them, for each format; and of a scale that is no number."""
    found = {}
    for name, (weight_dtype, moment) in FORMATS.items():
        for numel in (4096, 5000, 3):
            weight, gradient = torch.randn(numel).to(weight_dtype), torch.randn(numel).bfloat16()
            blocks = -(-numel // 256)
            state: tuple[Tensor, ...] = (torch.randn(numel), torch.rand(numel))
            if moment is None:
                codes = torch.randint(-127, 128, (numel,)).to(torch.int8), torch.randint(1, 255, (numel,)).byte()
                state = (codes[0], torch.rand(blocks), codes[1], torch.rand(blocks))
            else:
                state = (state[0].to(moment), state[1].to(moment))
            for scale in (0.5, math.nan):
                sides = []
                for change in (update, update_by_kernel):
                    own, whole = [one.clone() for one in (weight, *state)], torch.zeros(numel, dtype=torch.bfloat16)
                    seed = torch.tensor((77 << 32) + (1 << 31) + 5)
                    change(own[0], gradient, tuple(own[1:]), whole, torch.tensor(scale).double(), NUMBERS, seed)
                    sides.append([*own, whole])
                *held, whole = (difference(mine, plain) for plain, mine in zip(*sides, strict=True))
                changed = difference(sides[1][0], weight)
                found[f"{name} {numel} {scale}"] = {"held": max(held), "whole": whole, "changed": changed}
    return found


def losses() -> dict[str, dict[str, float]]:
    """Of the sum of losses and of the gradient of rows."""
    found = {}
    loss_kernel._WIDTH = 64
    for dtype in (torch.float32, torch.bfloat16):
        for z_loss in (None, 1e-2):
            for num_classes in (37, 200):
                rows, labels = (torch.randn(9, num_classes) * 5).to(dtype), torch.randint(0, num_classes, (9,))
                labels[3] = IGNORE
                plain, wide = rows.clone(), torch.nn.functional.pad(rows, (0, 3))
                mine = wide[:, :num_classes]  # rows may lie apart
                for with_gradient in (False, True):
                    totals = rows_loss(plain, labels, z_loss, with_gradient)
                    others = loss_kernel.rows_loss_by_kernel(mine, labels, z_loss, with_gradient)
                    name = f"{dtype} {z_loss} {num_classes} {with_gradient}"
                    found[name] = {"total": difference(others, totals), "rows": difference(mine, plain)}
                    found[name]["beside"] = float(wide[:, num_classes:].abs().max())
    return found


def labels() -> dict[str, dict[str, float]]:
    """Rows and losses that are no number, of labels that are no class, by the plain function and by the kernel."""
    found = {}
    loss_kernel._WIDTH = 64
    for label in (-1, -101, 37, 2**40):
        given = torch.tensor([3, label, IGNORE])
        for name, change in (("plain", rows_loss), ("kernel", loss_kernel.rows_loss_by_kernel)):
            rows = torch.randn(3, 40)[:, :37]
            total = change(rows, given, None, True)
            bad = rows.isnan().sum(1).tolist()
            found[f"{name} {label}"] = {"total": float(total.isnan()), "good": bad[0] + bad[2], "bad": bad[1]}
    return found


def takes() -> dict[str, dict[str, float]]:
    """Of a copied gradient, and of its square sum."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        for numel in (3, 8192, 20000):
            gradient, target = torch.randn(numel).to(dtype), torch.full((numel,), math.nan, dtype=dtype)
            squares = copy_with_squares(gradient, target)
            of_squares = difference(squares.sum(dtype=torch.float64), gradient.double().square().sum())
            found[f"{dtype} {numel}"] = {"target": difference(target, gradient), "squares": of_squares}
    return found


def rows() -> dict[str, dict[str, float]]:
    """Of the operations on rows of experts, without a capacity and with one, by which tokens are dropped."""
    found = {}
    row_kernel._WIDTH = 16
    for dtype in (torch.float32, torch.bfloat16):
        for is_padded in (False, True):
            experts = torch.rand(2, 9, 5).topk(3).indices
            order = fill_slots(experts, 5, 3) if is_padded else sort_by_expert(experts, 5)
            tokens, given = (torch.randn(18, 40).to(dtype) for _ in range(2))
            of_rows, weights = torch.randn(len(order.sources), 40).to(dtype), torch.rand(18, 3)
            gate_up, of_gated = torch.randn(7, 40).to(dtype), torch.randn(7, 20).to(dtype)
            calls = {
                "take_rows": (tokens, order.sources, 3, is_padded),
                "sum_rows": (of_rows, order.places, None, 3, is_padded),
                "weighted sum_rows": (of_rows, order.places, weights, 3, is_padded),
                "spread_rows": (given, of_rows, weights, order.sources, order.places, is_padded),
                "gated_gradient": (of_gated, gate_up),
            }
            told = {}
            for name, args in calls.items():
                of_kernel, plain = (getattr(module, name.split()[-1])(*args) for module in (row_kernel, row_operations))
                pairs = [(of_kernel, plain)] if isinstance(plain, Tensor) else zip(of_kernel, plain, strict=True)
                told[name] = max(difference(*pair) for pair in pairs)
            swapped = row_operations.sum_rows(of_rows, order.places.roll(1), weights, 3, is_padded)
            told["rows of other tokens"] = difference(swapped, row_operations.sum_rows(*calls["weighted sum_rows"]))
            found[f"{dtype} {is_padded}"] = told
    return found


@triton.jit
def _offsets(program_ptr, first_ptr, SIZE: tl.constexpr):  # noqa: N803
    program = tl.load(program_ptr)
    tl.store(first_ptr, take_kernel._first(program, SIZE))
    tl.store(first_ptr + 1, update_kernel._first(program, SIZE))


def offsets() -> dict[str, dict[str, float]]:
    """Where programs behind 2^31 elements begin, by each kernel; a tensor that long is not needed for it."""
    found = {}
    for program in (5, 2**18 - 1, 2**18, 2**20 + 3):
        firsts = torch.zeros(2, dtype=torch.int64)
        _offsets[(1,)](torch.tensor([program], dtype=torch.int32), firsts, SIZE=8192)
        found[str(program)] = dict(zip(("take", "update"), firsts.tolist(), strict=True))
    return found


@triton.jit
def _ranges(lowest_ptr, highest_ptr, scale_ptr, least_ptr, SIZE: tl.constexpr):  # noqa: N803
    places = tl.arange(0, SIZE)
    lowest, highest = tl.load(lowest_ptr + places), tl.load(highest_ptr + places)
    scale, least = four_bit_append_kernel._scale(lowest, highest)
    tl.store(scale_ptr + places, scale)
    tl.store(least_ptr + places, least)


def ranges() -> dict[str, dict[str, float]]:
    """Scales and least values of groups of two numbers, also beyond float16: how many differ, or are not finite."""
    edges = [1e-8, 0.1, 65504.0, 65519.9, 65520.0, 7e4, 1e6, 3e38]
    numbers = torch.tensor([0.0, *edges, *(-one for one in edges)])
    some = torch.cat([torch.cartesian_prod(numbers, numbers), torch.randn(223, 2) * 1e5]).sort(dim=1).values
    own = torch.empty(2, len(some), dtype=torch.float16)
    _ranges[(1,)](*some.T.contiguous(), *own, SIZE=len(some))
    plain = torch.stack(group_range(some, 4))
    differ = (own.view(torch.int16) != plain.view(torch.int16)).sum()
    return {"4 bits": {"differ": float(differ), "not finite": float((~own.isfinite()).sum())}}


POOLS = [  # batch, channels, rows, columns; window, stride, padding
    ((1, 8, 5, 7), (3, 1, 1)),
    ((2, 24, 6, 5), (3, 2, 1)),
    ((2, 8, 4, 4), (2,)),
    ((1, 136, 5, 6), ((2, 3), (1, 2), (1, 0))),
    ((1, 16, 7, 7), (5, 3, 2)),
]
KINDS = {
    "max": (F.max_pool2d, {}),
    "average": (F.avg_pool2d, {}),
    "average inside": (F.avg_pool2d, {"count_include_pad": False}),
}


def pools() -> dict[str, dict[str, float]]:
    """Of results and gradients, and whether kernels made them; of images with equal pixels, and with no numbers."""
    cases = [(name, shape, window, {}) for shape, window in POOLS for name in KINDS]
    few = (1, 12, 7, 7)
    others: list[dict[str, Any]] = [{"dilation": 2}, {"ceil_mode": True}]
    cases += [("max", (1, 8, 7, 7), (3, 2), one) for one in others] + [("max", few, (3, 2), {})]
    found = {}
    for name, shape, window, more in cases:
        values = torch.randint(-3, 4, shape).float().to(memory_format=torch.channels_last)
        values[0, :2, 0, :3], values[0, 2, 1:4, 1:4] = -math.inf, math.nan
        plain, settings = KINDS[name]
        sides = []
        for pool in (plain, kernel_pools()[plain]):
            images = values.clone().requires_grad_()
            result = pool(images, *window, **settings, **more)
            draws = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
            result.backward(draws)  # of another form than the result
            sides.append([torch.nan_to_num(one.detach(), 77.0, 78.0, -78.0) for one in (result, images.grad)])
        of_result, of_gradient = (difference(mine, plain) for plain, mine in zip(*sides, strict=True))
        is_by_kernel = float(result.grad_fn.name() == "_PoolBackward")
        told = {"result": of_result, "gradient": of_gradient, "by kernel": is_by_kernel}
        found[f"{'not ' if more or shape == few else ''}{name} {shape} {window} {more}"] = told
    return found


def decodes() -> dict[str, dict[str, float]]:
    """Of attention of one query of each request over pages: heads, windows, lengths, parts of a sequence."""
    found = {}
    decode_attention_kernel.TOKENS = 16
    for dtype in (torch.float32, torch.float16):  # the interpreter multiplies no matrices of bf16
        for (num_heads, num_key_heads, head_dim), window, num_programs in (
            ((4, 2, 8), None, 1),
            ((3, 3, 20), 5, 1),
            ((2, 1, 16), None, 32),
            ((3, 1, 8), 21, 32),
        ):
            decode_attention_kernel._PROGRAMS = num_programs
            lengths = torch.tensor([1, 17, 50], dtype=torch.int32)
            tables = torch.randperm(48, dtype=torch.int32).reshape(3, 16)[:, :13]  # rows lie apart
            query = torch.randn(3, num_heads, head_dim).to(dtype)
            keys, values = (torch.randn(48 * 4, num_key_heads, head_dim).to(dtype) for _ in range(2))
            given = (query, keys, values, tables, lengths, 4, window)
            name = f"{dtype} {num_heads} {num_key_heads} {head_dim} {window} {num_programs}"
            found[name] = {"mixed": difference(decode_attention_by_kernel(*given), decode_attention(*given))}
            given[4][1] = 0  # the second request does not decode
            outs = [torch.full_like(query, 7.0) for _ in range(2)]
            decode_attention_by_kernel(*given, out=outs[0])
            decode_attention(*given, out=outs[1])
            found[name] |= {
                "some": difference(*outs),
                "untouched": difference(outs[0][1], torch.full_like(query[1], 7)),
            }
    return found


def tiles() -> dict[str, dict[str, float]]:
    """Of attention of prompts in tiles over pages, also to that of whole prompts; a key too many as a control."""
    found = {}
    prompt_attention_kernel._TOKENS = 16
    for dtype, (num_heads, num_key_heads, head_dim), window in (
        (torch.float32, (4, 2, 8), None),
        (torch.float32, (3, 1, 20), 5),
        (torch.float16, (2, 2, 16), None),
        (torch.float16, (3, 3, 8), 21),
    ):
        queries, lengths = [1, 20, 33], [9, 20, 50]  # the second prompt begins, the others go on
        tables = torch.randperm(48, dtype=torch.int32).reshape(3, 16)[:, :13]
        query = torch.randn(2 + sum(queries), num_heads, head_dim).to(dtype)
        keys, values = (torch.randn(48 * 4, num_key_heads, head_dim).to(dtype) for _ in range(2))
        made = tiles_of(queries, lengths, first_token=2)
        tile = torch.tensor([*made, (0, 0, 0, 0)], dtype=torch.int32).T.contiguous()
        outs = [torch.zeros_like(query) for _ in range(2)]
        for by, out in zip((prompt_attention_by_kernel, prompt_attention_by_tiles), outs, strict=True):
            by(query, keys, values, tables, tile, 4, window, out)
        batch = PagedBatch(*[tables] * 4, torch.tensor(lengths), tables[:, 0], 4, 0, queries, lengths)
        whole = pages_of(keys, values, 4).attend(query[2:], keys, values, batch, window)
        tile[3] += 1
        wrong = torch.zeros_like(query)
        prompt_attention_by_kernel(query, keys, values, tables, tile, 4, window, wrong)
        found[f"{dtype} {num_heads} {num_key_heads} {head_dim} {window}"] = {
            "tiles": difference(*outs),
            "whole": difference(outs[0][2:], whole),
            "others": float(outs[0][:2].abs().max()),
            "a key too many": difference(wrong[2:], whole),
        }
    return found


def four_bits() -> dict[str, dict[str, float]]:
    """Of attention over a cache of 4 bits, and of what a decode adds to it; without the tail, as a control."""
    found = {}
    for dtype, (num_heads, num_key_heads, head_dim), window, num_programs, page in (
        (torch.float32, (4, 2, 8), None, 1, 64),
        (torch.float32, (2, 1, 72), 70, 32, 64),
        (torch.float16, (3, 1, 20), None, 16, 64),  # the interpreter multiplies no matrices of bf16
        (torch.float32, (2, 2, 40), 50, 16, 32),
        (torch.float32, (2, 1, 72), None, 1, 128),
    ):
        four_bit_attention_kernel._PROGRAMS = num_programs
        sizes = CacheSizes(13, page, 4, num_key_heads, head_dim, dtype, torch.device("cpu"))
        layers = [FourBitPages(sizes) for _ in range(2)]
        lengths = torch.tensor([1, page, 2 * page + 2, 3 * page], dtype=torch.int32)
        tables = torch.randperm(12, dtype=torch.int32).reshape(4, 3)
        rows = torch.tensor([2, 0, 3, 1], dtype=torch.int32)
        both = ((*layer.pages, layer._tails) for layer in layers)
        for one, other in zip(*both, strict=True):
            fill = torch.randint(0, 256, one.shape) if one.dtype == torch.uint8 else torch.rand(one.shape) - 0.3
            one.copy_(fill)
            other.copy_(fill)
        query = torch.randn(4, num_heads, head_dim).to(dtype)
        key, value = (torch.randn(4, num_key_heads, head_dim).to(dtype) for _ in range(2))
        places = lengths - 1
        slots = tables.gather(1, (places // page)[:, None].long())[:, 0].long() * page + places % page
        batch = PagedBatch(places, places, slots, tables, lengths, rows, page, 4)
        mixed = [layer(query, key, value, batch, window) for layer in (layers[0]._decode_by_kernel, layers[1]._decode)]
        name = f"{dtype} {num_heads} {num_key_heads} {head_dim} {window} {num_programs} {page}"
        # Plain functions write what is not full, and the other half of a page, to the last page.
        pairs = [(mine[:-1], plain[:-1]) for mine, plain in zip(layers[0].pages, layers[1].pages, strict=True)]
        pairs.append((layers[0]._tails, layers[1]._tails))
        found[name] = {
            "mixed": difference(*mixed),
            "pages": float(sum((one != other).sum() for one, other in pairs)),
        }
        layers[0]._tails.zero_()
        given = (layers[0].pages, layers[0]._tails, tables, lengths, rows, window)
        found[name]["without a tail"] = difference(four_bit_attention_by_kernel(query, *given), mixed[1])
    return found


def four_bit_prompts() -> dict[str, dict[str, float]]:
    """Of attention of prompts over a cache of 4 bits, and of what they add to it; without tails, as a control."""
    found = {}
    four_bit_attention_kernel._PROGRAMS = 16  # the interpreter runs one after the other
    cases = (  # chunks are (tokens, tokens in the cache after them), in pages of 64 of which each request has three
        (torch.float32, (4, 2, 8), None, 64, ((64, 64), (70, 100), (1, 65), (130, 192), (150, 180))),
        (torch.float32, (2, 1, 72), 70, 64, ((50, 50), (100, 190), (64, 128))),
        (torch.float16, (3, 1, 20), None, 64, ((33, 97), (128, 150))),
        (torch.float32, (8, 1, 8), 20, 32, ((40, 96), (63, 95), (40, 70))),
        (torch.float32, (2, 2, 40), None, 128, ((150, 300), (128, 128))),
        (torch.float32, (4, 2, 8), None, 64, ((5, 130), (1, 64), (16, 70))),  # as decodes
        (torch.float32, (2, 1, 72), 50, 32, ((16, 95), (3, 60))),
        (torch.float32, (2, 2, 8), None, 32, ((5, 50), (1, 30))),
        (torch.float32, (40, 1, 8), 20, 32, ((18, 40),)),  # two queries of a program
    )
    for index, (dtype, (num_heads, num_key_heads, head_dim), window, page, chunks) in enumerate(cases):
        number = len(chunks) + 1  # the first request decodes
        sizes = CacheSizes(3 * number + 1, page, number, num_key_heads, head_dim, dtype, torch.device("cpu"))
        layers = [FourBitPages(sizes) for _ in range(2)]
        tables = torch.randperm(3 * number, dtype=torch.int32).reshape(number, 3)
        rows = torch.randperm(number, dtype=torch.int32)
        for one, other in zip(*((*layer.pages, layer._tails) for layer in layers), strict=True):
            fill = torch.randint(0, 256, one.shape) if one.dtype == torch.uint8 else torch.rand(one.shape) - 0.3
            one.copy_(fill)
            other.copy_(fill)
        queries, lengths = zip(*chunks, strict=True)
        places = [range(length - count, length) for count, length in chunks]
        of_tables = zip(slots_of(tables[1:], 3 * page, page), places, strict=True)
        slots = torch.cat([every[list(own)] for every, own in of_tables])
        slots, ends = torch.cat([slots[:1], slots]), torch.tensor([1, *lengths], dtype=torch.int32)
        batch = PagedBatch(slots, slots, slots, tables, ends, rows, page, 1, queries, lengths)
        query = torch.randn(sum(queries), num_heads, head_dim).to(dtype)
        keys, values = (torch.randn(sum(queries), num_key_heads, head_dim).to(dtype) for _ in range(2))
        given = (query, keys, values, batch, window)
        plain, mixed = layers[0]._prompts(*given), layers[1]._prompts_by_kernel(*given)
        pairs = [(one[:-1], other[:-1]) for one, other in zip(*(layer.pages for layer in layers), strict=True)]
        pairs.append((layers[0]._tails, layers[1]._tails))
        own = {"mixed": difference(mixed, plain), "pages": float(sum((one != other).sum() for one, other in pairs))}
        layers[1]._tails.zero_()
        own["without a tail"] = difference(layers[1]._prompts_by_kernel(*given), plain)
        found[f"{index} {dtype} {num_heads} {num_key_heads} {head_dim} {window} {page}"] = own
    return found


def chosen() -> dict[str, dict[str, float]]:
    """Of the tokens that Loki chooses, with many equal scores, and of attention to them."""
    found = {}
    decode_attention_kernel.TOKENS, loki_kernel._TOKENS, loki_kernel._CHUNK = 16, 16, 32
    for dtype, (num_heads, num_key_heads, head_dim), window, choice, num_programs in (
        (torch.float32, (4, 2, 8), None, LokiChoice(0.5, 0.3, 2, 1), 1),
        (torch.float32, (3, 1, 24), 40, LokiChoice(0.25, 0.25, 3, 20), 16),
        (torch.float16, (2, 2, 16), None, LokiChoice(0.25, 0.4, 5, 30), 16),
    ):
        decode_attention_kernel._PROGRAMS = loki_kernel._PROGRAMS = num_programs
        lengths = torch.tensor([1, 17, 50], dtype=torch.int32)
        tables = torch.randperm(48, dtype=torch.int32).reshape(3, 16)[:, :13]  # rows lie apart
        query = torch.randn(3, num_heads, head_dim).to(dtype)
        keys, values = (torch.randn(48 * 4, num_key_heads, head_dim).to(dtype) for _ in range(2))
        keys[..., 0], keys[..., 1:6] = keys[..., 0].round(), 0
        added = pages_after_decodes(choice, (num_heads, num_key_heads, head_dim), dtype)
        given, loki = (query, keys, values, tables, lengths, 4, window), loki_of(keys, values, 4, choice)
        first, batch = loki.pages[2], decodes_of(tables, lengths, 4)
        numbers = (choice.tokens, choice.newest, choice.dense_below, choice.most_tokens(52))
        slots, counts = chosen_slots_by_kernel(query, first, tables, lengths, window, numbers)
        every = slots_of(tables, 52, 4).long()
        scored = keys[..., : choice.num_dims(head_dim)][every]
        places, taken = chosen_tokens(query, scored, lengths, window, choice, batch.pages)
        wrong = 0
        for request in range(3):
            for head in range(num_key_heads):
                mine = slots[request, head, : int(counts[request, head])].tolist()
                plain = every[request][places[request, head][taken[request, head]].sort()[0]].tolist()
                wrong += mine != plain
        name = f"{dtype} {num_heads} {num_key_heads} {head_dim} {window}"
        expected = loki._decode(query, batch, window)
        found[name] = {
            "mixed": difference(loki._decode_by_kernel(query, batch, window), expected),
            "choices that differ": float(wrong),
            "to all tokens": difference(decode_attention(*given), expected),
            **added,
        }
    return found


def pages_after_decodes(choice: LokiChoice, heads: tuple[int, int, int], dtype: torch.dtype) -> dict[str, float]:
    """Of queries along the axes of Loki, and of the pages to which keys and values go."""
    num_heads, num_key_heads, head_dim = heads
    sizes = CacheSizes(6, 4, 3, num_key_heads, head_dim, dtype, torch.device("cpu"))
    axes = torch.linalg.qr(torch.randn(num_key_heads, head_dim, head_dim))[0]
    layers = [LokiPages(axes, choice, PlainStorage().new_pages(sizes), sizes) for _ in range(2)]
    query, keys, values = (torch.randn(3, number, head_dim).to(dtype) for number in (num_heads, *2 * (num_key_heads,)))
    given = (query, keys, values, torch.tensor([5, 14, 23]))
    found = [layer._turn_and_store(*given, index == 1) for index, layer in enumerate(layers)]
    named = zip(("keys", "values", "first dims"), layers[0].pages, layers[1].pages, strict=True)
    turned = {"queries along axes": difference(found[1], found[0])}
    return turned | {f"{name} in pages": difference(other, one) for name, one, other in named}


def packed() -> dict[str, dict[str, float]]:
    """Of products with weights in fewer bits, and what follows them; of other scales, as a control."""
    found = {}
    packed_product_kernel._OUTPUTS, packed_product_kernel._COLUMNS = 16, 16
    packed_row_kernel._SQUARES = 256
    for dtype, kind, num_in, num_rows in (
        (torch.float32, "int4", 256, 3),
        (torch.float32, "int4", 96, 1),
        (torch.float32, "int4-128", 640, 17),
        (torch.float32, "int8", 256, 2),
        (torch.float32, "fp8", 96, 3),
        (torch.float16, "int4", 640, 1),
        (torch.float16, "int4-128", 384, 1),
        (torch.float16, "int8", 96, 1),
        (torch.float16, "fp8", 160, 1),
        (torch.float16, "fp8", 640, 2),
        (torch.float32, "int4-32", 256, 2),  # of folders of others
        (torch.float16, "int4-32", 256, 1),
    ):
        hidden = torch.randn(num_rows, num_in).to(dtype)
        form = Grouped(4, 32) if kind == "int4-32" else weight_format(kind)
        num_out = 42 if num_rows > 1 or dtype == torch.float32 else 10  # one token's is slow
        bias, residual = torch.randn(num_out).to(dtype), torch.randn(num_rows, num_out).to(dtype)
        parts = form.quantise(torch.randn(num_out, num_in) + 0.3)
        plain = hidden.double() @ form.dequantise(parts, torch.float64).T
        norm = RMSNorm(num_in, 1e-6).to(dtype)
        norm.weight.data.normal_()
        of_norm = norm(hidden).double() @ form.dequantise(parts, torch.float64).T
        for multiply in products_of(hidden):
            own = found.setdefault(f"{dtype} {kind} {num_in} {num_rows} {multiply.__name__}", {})
            for name, after in {
                "out": AfterProduct(),
                "gated": AfterProduct(bias, None, True),
                "added": AfterProduct(None, residual),
            }.items():
                own[name] = difference(multiply(*given_to_kernel(form, hidden, parts, after)), after.of(plain))
            if multiply is not packed_product_by_kernel:
                after = AfterProduct(bias, None, True)
                given = given_to_kernel(form, hidden, parts, after)
                own["norm"] = difference(multiply(*given, norm), after.of(of_norm))
            other = given_to_kernel(form, hidden, (parts[0], parts[1].roll(1, 0)), AfterProduct())
            own["scales of other outputs"] = difference(multiply(*other), plain)
    return found


def products_of(hidden: Tensor) -> list[Callable[..., Tensor]]:
    """The kernels that can multiply these rows."""
    few, one = len(hidden) <= FEW_ROWS, len(hidden) == 1 and hidden.dtype == torch.float16
    return [
        packed_product_by_kernel,
        *([product_of_rows_by_kernel] if few else []),
        *([product_of_token] if one else []),
    ]


def product_of_token(*given: Any) -> Tensor:
    """By programs that load the codes of some outputs while they compute others."""
    norm = given[5] if len(given) > 5 else None
    return product_of_token_by_kernel(*given[:5], norm, TokenLaunch(4, 2, 1))


def given_to_kernel(form: WeightFormat, hidden: Tensor, parts: tuple[Tensor, ...], after: AfterProduct) -> Any:
    assert isinstance(form, Grouped | RowFp8)
    return hidden, *form.kernel_parts(parts), form.block(hidden.shape[1]), after


def serving() -> dict[str, dict[str, float]]:
    """Of what lies between the matmuls of a block that is served, and of a matmul of one row."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        hidden, residual, gate_up = (torch.randn(3, size).to(dtype) for size in (20, 37, 40))
        norm = RMSNorm(20, 1e-6).to(dtype)
        norm.weight.data.normal_()
        found[f"norm {dtype}"] = {"out": difference(norm_by_kernel(hidden, norm.weight, 1e-6), norm(hidden))}
        found[f"gated {dtype}"] = {"out": difference(gated_by_kernel(gate_up), plain_gate(gate_up))}
        row = hidden[:1]
        for bias in (False, True):
            layer, pair = (torch.nn.Linear(20, size, bias=bias).to(dtype) for size in (37, 74))
            weights = (layer.weight, layer.bias)
            found[f"row {bias} {dtype}"] = {
                "norm": difference(
                    row_linear_by_kernel(row, *weights, norm=norm), PlainLinear(layer, NOWHERE, norm)(row)
                ),
                "gated": difference(
                    row_linear_by_kernel(row, pair.weight, pair.bias, norm=norm, is_gated=True),
                    PlainLinear(pair, NOWHERE, norm, is_gated=True)(row),
                ),
                "added": difference(
                    row_linear_by_kernel(row, *weights, residual[:1]), PlainLinear(layer, NOWHERE)(row, residual[:1])
                ),
            }
        for norms in (None, (RMSNorm(6, 1e-6).to(dtype), RMSNorm(6, 1e-2).to(dtype))):
            projected, angles = torch.randn(3, (4 + 2 * 2) * 6).to(dtype), torch.randn(9, 3).repeat(1, 2)
            rotary = (angles.cos().to(dtype), angles.sin().to(dtype))
            places = (torch.tensor([0, 8, 3], dtype=torch.int32), torch.tensor([7, 2, 5]))
            sides = []
            turned = (angles_at(rotary, places[0]), places[1])  # of the tokens' positions
            for change, where in ((rotate_and_store_by_kernel, (rotary, *places)), (rotate_by_angles, turned)):
                keys, values = torch.zeros(8, 2, 6, dtype=dtype), torch.zeros(8, 2, 6, dtype=dtype)
                query = change(projected, (4, 2, 6), norms, *where, keys, values)
                sides.append((query, keys, values))
            both = zip(*sides, strict=True)
            found[f"rotate {norms is None} {dtype}"] = {str(i): difference(*side) for i, side in enumerate(both)}
    sampling_kernel._TOKENS = 64
    logits, keys = torch.randn(40, 150)[:, :130], torch.randint(-(2**31), 2**31, (40, 2)).int()
    temperature, positions = torch.rand(40, 3)[:, :1] + 0.5, torch.arange(40) * 77777
    temperature[5] = 0.0
    draws = [one(logits, temperature, keys, positions) for one in (sampling_kernel.draw_by_kernel, draw)]
    found["draws float32"] = {
        "differ": float((draws[0] != draws[1]).sum()),
        "alike": float(draws[1].unique().numel() < 9),
    }
    return found


def filters() -> dict[str, dict[str, float]]:
    """Of draws by temperature, top_k, top_p and min_p, with many equal logits: how many differ."""
    found = {}
    sampling_kernel._CHUNK, sampling_kernel._TOKENS = 128, 64
    for dtype in (torch.float32, torch.bfloat16):
        number, vocab = 16, 203
        logits = (torch.randn(number, vocab + 5) * 3).to(dtype)[:, :vocab]
        logits[::2] = (logits[::2] * 2).round() / 2
        logits[5, 20:], logits[6, :2], logits[6, 2:] = -math.inf, torch.tensor([-0.0, 0.0]).to(dtype), -1.0
        keys, positions = torch.randint(-(2**31), 2**31, (number, 2)).int(), torch.arange(number) * 77777
        temperature, top_p, top_k = (torch.rand(number, 1) + low for low in (0.3, 0.05, 0.0))
        temperature[7], top_p, top_k = 0.0, top_p.clamp(max=1.0), (top_k * 40).ceil()
        top_k[::3], top_p[1::3], log_min_p = vocab, 1.0, torch.full((number, 1), 1e-38).log()
        log_min_p[::4], top_k[6] = -2.5, 1.0
        nothing = ActiveRequest(Request("x", (1,), 9, Sampling(top_p=0.0)), 0, 99, 7, [1], row=0)
        top_p[9] = _settings_of([nothing], vocab, logits.device).top_p[0]
        given = (temperature, top_k, top_p, log_min_p)
        names = ("temperature", "top_k", "top_p", "log_min_p")
        settings: Any = SimpleNamespace(keys=keys, **dict(zip(names, given, strict=True)))
        plain = filtered_draw_by_sorting(logits.float(), settings, positions)
        left = sampling_kernel.filter_by_kernel(logits, *given)
        drawn = sampling_kernel.draw_by_kernel(logits, temperature, keys, positions, left)
        free = sampling_kernel.draw_by_kernel(logits, temperature, keys, positions)
        found[f"draws {dtype}"] = {
            "differ": float((drawn != plain)[temperature[:, 0] > 0].sum()),
            "alike without filters": float((free == plain).sum() > 13),
        }
    # A top_p next to 1: by rounding, 40 tokens have less than this share of their sum. They are left all the same.
    sampling_kernel._CHUNK = 64
    logits = torch.stack([torch.randn(64, generator=torch.Generator().manual_seed(seed)) for seed in (57, 242, 615)])
    one = torch.ones(3, 1)
    lowest, last = sampling_kernel.filter_by_kernel(logits, one, 40 * one, 0.99999994 * one, (1e-38 * one).log())
    bits = logits.view(torch.int32)
    order = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_left = (order > lowest[:, None]) | ((order == lowest[:, None]) & (torch.arange(64) <= last[:, None]))
    found["left of top_k by top_p"] = {"differ": float((is_left.sum(1) - 40).abs().max())}
    return found


CASES = {
    "filters": filters,
    "updates": updates,
    "losses": losses,
    "takes": takes,
    "rows": rows,
    "pools": pools,
    "labels": labels,
    "offsets": offsets,
    "decodes": decodes,
    "tiles": tiles,
    "ranges": ranges,
    "four_bits": four_bits,
    "four_bit_prompts": four_bit_prompts,
    "chosen": chosen,
    "packed": packed,
    "serving": serving,
}
