"""The served attention: every storage x choice x share of pages, against the attention of one token at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS
from torch import Tensor

from weft.comm import Axis
from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Context, Plan
from weft.serve.attention.batch import CacheSizes, PagedBatch, PageShare
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.attention.four_bits import FourBitStorage
from weft.serve.model.ranks import ServingRanks
from weft.serve.weights.group_codes import codes_of, group_range

HEADS, KEY_HEADS, DIM, PAGE = 4, 2, 6, 32
CHUNKS = (40, 1, 1, 30, 1, 60, 1, 26, 1)  # over pages of all ranks; chunks of one token are decodes
WINDOWS = (None, 41)
CHOICE = LokiChoice(dims=0.5, tokens=0.3, newest=2, dense_below=5)
TABLE = torch.tensor([[4, 0, 3, 1, 5, 2]], dtype=torch.int32)  # blocks in any order
GENERATOR = torch.Generator().manual_seed(0)
QUERY = torch.randn(sum(CHUNKS), HEADS, DIM, generator=GENERATOR, dtype=torch.float64)
KEYS, VALUES = torch.randn(2, sum(CHUNKS), KEY_HEADS, DIM, generator=GENERATOR, dtype=torch.float64)
AXES = torch.linalg.qr(torch.randn(1, KEY_HEADS, DIM, DIM, generator=GENERATOR, dtype=torch.float64))[0]
FORMATS = {
    "plain": CacheFormat(),
    "int4": CacheFormat(FourBitStorage(PAGE)),
    "loki": CacheFormat(loki=Loki(AXES, CHOICE)),
}


def rounded(groups: Tensor) -> Tensor:
    """Numbers in 4 bits, in groups along the last dim."""
    scale, least = group_range(groups, 4)
    return codes_of(groups, scale, least, 4).double() * scale.double()[..., None] + least.double()[..., None]


def expected(name: str, window: int | None) -> Tensor:
    """The attention of every token, one by one and head by head."""
    keys, values, is_decode = KEYS, VALUES, [size == 1 for size in CHUNKS for _ in range(size)]
    if name == "int4":
        pages = [one.movedim(0, -1) for one in KEYS.split(PAGE)]
        keys, values = torch.cat([rounded(one).movedim(-1, 0) for one in pages]), rounded(VALUES)
    out = torch.empty_like(QUERY)
    for place, query in enumerate(QUERY):
        own, oldest = place // PAGE * PAGE, 0 if window is None else max(0, place + 1 - window)
        for head in range(HEADS):
            of_key = head // (HEADS // KEY_HEADS)
            key = torch.cat([keys[:own, of_key], KEYS[own : place + 1, of_key]])
            seen = torch.arange(oldest, place + 1)
            if name == "loki" and is_decode[place]:
                seen = seen[chosen(query, key[oldest:], of_key)]
            weights = (key[seen] @ query[head] / math.sqrt(DIM)).softmax(0)
            out[place, head] = weights @ values[seen, of_key]
    return out


def chosen(query: Tensor, key: Tensor, key_head: int) -> list[int]:
    """The places of chosen tokens, by a search through all."""
    group, number, num_dims = HEADS // KEY_HEADS, len(key), CHOICE.num_dims(DIM)
    axes = AXES[0, key_head][:, :num_dims]
    scores = (key @ axes) @ (query[key_head * group : (key_head + 1) * group] @ axes).T
    joint = (scores - scores.amax(0)).amax(1).tolist()
    forced = {0, *range(number - CHOICE.newest, number)}
    wanted = number if number < CHOICE.dense_below else max(math.ceil(CHOICE.tokens * number), CHOICE.newest + 1)
    ranked = sorted(range(number), key=lambda place: (place not in forced, -joint[place], place))
    return sorted(ranked[:wanted])


def attended(form: CacheFormat, window: int | None, share: PageShare | None, axis: Axis | None) -> Tensor:
    """The attention of all chunks, one after the other, by a layer of the cache."""
    num_blocks, block_size = TABLE.shape[1], PAGE if share is None else share.block_size
    shape = (num_blocks + 1, PAGE, 2, KEY_HEADS, DIM)
    layer = form.layer(0, CacheSizes(*shape, torch.float64, torch.device("cpu"), axis))
    parts, start = list[Tensor](), 0
    for size in CHUNKS:
        end, places = start + size, torch.arange(start, start + size)
        slots = TABLE[0].long()[places // block_size] * block_size + places % block_size
        slots = slots if share is None else share.own_slots(slots, num_blocks * PAGE)
        lengths, rows = torch.tensor([end], dtype=torch.int32), torch.tensor([1], dtype=torch.int32)
        counts: tuple[Any, ...] = (1,) if size == 1 else (0, (size,), (end,))
        batch = PagedBatch(places, places, slots, TABLE, lengths, rows, PAGE, *counts, share=share)
        room, keys, values = layer.room(batch)
        keys[room], values[room] = KEYS[start:end], VALUES[start:end]
        parts.append(layer.attend(QUERY[start:end], keys, values, batch, window))
        start = end
    return torch.cat(parts)


@pytest.mark.parametrize(
    "degree", [1, pytest.param(2, marks=pytest.mark.processes), pytest.param(3, marks=pytest.mark.processes)]
)
def test_every_combination_attends_as_one_token_at_a_time(degree: int) -> None:
    cases = [(name, window) for name in FORMATS for window in WINDOWS]

    def rank(index: int) -> list[Any]:
        torch.set_num_threads(1)
        share = PageShare(index, degree, PAGE) if degree > 1 else None
        axis = ServingRanks(Mesh(Plan(context=Context(degree)))).axes.context if degree > 1 else None
        return [attended(FORMATS[name], window, share, axis).tolist() for name, window in cases]

    for found in [rank(0)] if degree == 1 else run_local(rank, degree, LIMIT_SECONDS):
        for (name, window), mixed in zip(cases, found, strict=True):
            own = torch.tensor(mixed, dtype=torch.float64)
            torch.testing.assert_close(own, expected(name, window), rtol=0, atol=1e-12, msg=f"{name} {window}")


def test_storages_and_choices_differ() -> None:
    """The control: what the combinations are compared with is not the same for all of them."""
    plain, *others = (expected(name, None) for name in FORMATS)
    assert all(float((other - plain).abs().max()) > 1e-3 for other in others)


def test_a_combination_that_the_table_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match="Loki is not served over a cache of int4-32; give one of the two"):
        CacheFormat(FourBitStorage(PAGE), Loki(AXES, CHOICE))
