"""Serves tiny models on ranks of this machine, in float64, where sums in another order change no token."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from serving_for_tests import CONFIGS, GREEDY, serve_all, tiny_model, tokens_of
from torch import Tensor, nn

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.step_inputs import StepInputs
from weft.serve.parallel.rank_part import RankPlace, build_part, read_part, refuse_plan
from weft.serve.replicas import ReplicaFront, serve_replica
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.packed_linear import make_room
from weft.serve.weights.weight_formats import FORMATS

LIMIT_SECONDS = 300.0
SCORED = Request("scored", (3, 1, 4, 1, 5), 1)  # how likely its tokens are is asked for


def whole_model(name: str) -> nn.Module:
    return tiny_model(name).double()


def part_of(name: str, place: RankPlace, weights: str | None = None) -> nn.Module:
    """The part of a tiny model at a place, with weights in a format if one is named."""
    values = dict(whole_model(name).named_parameters())
    model, cuts = build_part(CONFIGS[name], place)
    model.double()
    if weights is not None:
        make_room(model, FORMATS[weights])
    read_part(model, cuts, lambda one: values[one].detach(), "cpu")
    return model


def tokens_on_ranks(
    name: str,
    mesh: Mesh,
    requests: list[Request],
    options: EngineOptions,
    place: RankPlace | None = None,
    ranks: ServingRanks | None = None,
    weights: str | None = None,
) -> dict[str, Any] | None:
    """On each rank of a mesh: serve requests. Returns what rank 0 found; None on others. With a `place`, this rank
    holds the part of another.
    """
    ranks = ranks or ServingRanks(mesh)
    axis = mesh.with_own_group("data", "requests") if mesh.plan.data > 1 else mesh["data"]
    model = part_of(name, place or ranks.place, weights)
    mesh.ledger.clear()
    if not ranks.is_lead:
        follow_steps(ModelPart(model, options, ranks))
        return None
    own = Engine(model, options, ranks)
    if axis.index > 0:
        serve_replica(own, axis)
        return None
    engine = ReplicaFront(own, axis, 64) if axis.degree > 1 else own
    found = tokens_of(serve_all(engine, requests, every=1))  # type: ignore[arg-type]
    engine.add(Request("cancelled", (1, 2, 3), 20))
    engine.step()
    engine.cancel("cancelled")
    while engine.has_work():
        engine.step()
    engine.idle()
    state = engine.state()
    embedding = engine.embed((5, 6, 7, 8, 9, 1), "mean").tolist()
    scores = [one.token for one in engine.score(SCORED)]
    engine.close()
    return {
        "tokens": found,
        "embedding": embedding,
        "scores": scores,
        "preempted": state.num_preempted,
        "prefix": state.num_prefix_tokens,
        "is_free": state.num_free_blocks == state.num_blocks,
    }


def scarce(plan: Plan) -> EngineOptions:
    """Prompts come in chunks, and there are too few blocks: 7 of 4 tokens, on as many ranks as hold their pages."""
    return EngineOptions(block_size=4 // plan.context.degree, num_blocks=7, token_budget=4, max_running=4)


def step_of(tokens: Sequence[int], start: int, end: int, blocks: Sequence[int], size: int) -> StepInputs:
    """The inputs of the tokens `start` to `end` of a request with these blocks. The next is sampled."""
    places = torch.arange(start, end, dtype=torch.int32)
    slots = torch.tensor(blocks, dtype=torch.int32)[places.long() // size] * size + places % size
    flat = torch.stack([torch.tensor(tokens[start:end], dtype=torch.int32), torch.full_like(places, -1), places, slots])
    tables = torch.tensor([[end, 0, *blocks]], dtype=torch.int32)
    return StepInputs(flat, tables, [end - start], int(end - start == 1), [end - start - 1])


def logits_of(part: ModelPart, ends: Sequence[int], blocks: Sequence[int]) -> Tensor:
    """Of a request that is computed up to each of `ends`, one after the other, in these blocks."""
    tokens = [(7 * place + place * place) % 61 for place in range(ends[-1])]
    steps = [step_of(tokens, *pair, blocks, part.layout.block_size) for pair in pairwise((0, *ends))]
    found = [part.logits(inputs) for inputs in steps]
    return torch.cat([one[0] for one in found if one is not None])


def logits_of_long(name: str, dtype: torch.dtype, device: torch.device, ranks: ServingRanks | None) -> Tensor:
    """Of a request of 400 tokens, in three chunks and four decodes, in blocks of 32 tokens."""
    model = whole_model(name) if ranks is None else part_of(name, ranks.place)
    size = 32 if ranks is None else 32 // ranks.mesh.plan.context.degree
    part = ModelPart(model, EngineOptions(block_size=size, num_blocks=20, dtype=dtype, device=device), ranks)
    blocks = torch.randperm(20, generator=torch.Generator().manual_seed(0)).tolist()[:13]
    return logits_of(part, (37, 200, 396, 397, 398, 399, 400), blocks).double().cpu()


def requests() -> list[Request]:
    """Greedy and seeded ones, short and long; two have the same beginning, which the prefix cache shares."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(61) for _ in range(length)) for length in (1, 9, 15, 5)]
    shared = tuple(range(9))
    found = [Request(str(index), prompt, 12, GREEDY) for index, prompt in enumerate(prompts)]
    found += [Request("shared", (*shared, 3), 5, GREEDY), Request("again", (*shared, 4), 5, GREEDY)]
    return [*found, Request("drawn", (7, 8), 12, Sampling(temperature=1.0, seed=3, repetition_penalty=1.2))]


def on_one_rank(name: str) -> tuple[dict[str, list[int]], list[float], list[float]]:
    engine = Engine(whole_model(name), EngineOptions(block_size=4, num_blocks=60))
    scores = [one.token for one in engine.score(SCORED)]
    return tokens_of(serve_all(engine, requests())), engine.embed((5, 6, 7, 8, 9, 1), "mean").tolist(), scores


def check(cases: list[tuple[str, Plan]], num_ranks: int) -> None:
    """Serve every case on the same ranks, with too few blocks for all requests, and compare with one rank."""
    expected = {name: on_one_rank(name) for name, _ in cases}
    for name, plan in cases:
        refuse_plan(CONFIGS[name], plan)

    def rank(_: int) -> list[dict[str, Any] | None]:
        torch.set_num_threads(1)
        return [tokens_on_ranks(name, Mesh(plan), requests(), scarce(plan)) for name, plan in cases]

    for (name, plan), found in zip(cases, run_local(rank, num_ranks, LIMIT_SECONDS)[0], strict=True):
        tokens, embedding, scores = expected[name]
        assert found["tokens"] == tokens, (name, plan.describe_axes())
        assert found["embedding"] == pytest.approx(embedding, abs=1e-6)
        assert found["scores"] == pytest.approx(scores, abs=1e-5)
        assert found["is_free"]
        assert found["preempted"] > 0
        if plan.data == 1:
            assert found["prefix"] > 0
