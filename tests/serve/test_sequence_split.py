"""The ranks of `context` hold the keys and values of each request together: tokens and logits are those of one rank."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import SCORED, part_of, tokens_on_ranks, whole_model
from serving_for_tests import CONFIGS, GREEDY, serve_all, tokens_of
from torch import Tensor

from weft.errors import ConfigError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Context, Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve import split_attention
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.model_part import ModelPart
from weft.serve.page_share import PageShare
from weft.serve.rank_part import refuse_plan
from weft.serve.ranks import RankMessage, ServingRanks
from weft.serve.request import Request, Sampling
from weft.serve.step_inputs import StepInputs, text_inputs
from weft.serve.traffic import ServedSizes, step_calls

LIMIT_SECONDS = 300.0
TWO = Plan(context=Context(2))
SCARCE = EngineOptions(block_size=2, num_blocks=7, token_budget=4, max_running=4)  # chunks, and too few blocks
# Sliding windows, learned positions, norms of heads, and other axes beside.
FOUR_RANKS = [
    ("mistral", Plan(context=Context(2), tensor=TensorDegrees(2))),
    ("gpt2", Plan(context=Context(2), pipe=Pipe(2))),
    ("qwen3", Plan(context=Context(4))),
    ("mixtral", Plan(context=Context(2), expert=2)),
    ("llama", Plan(context=Context(2), data=2)),
    ("qwen2", Plan(context=Context(2), tensor=TensorDegrees(1, 2))),
]


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
    return tokens_of(serve_all(engine, requests())), engine.embed((5, 6, 7), "mean").tolist(), scores


def check(cases: list[tuple[str, Plan]], num_ranks: int) -> None:
    """Serve every case on the same ranks, and compare with one rank."""
    expected = {name: on_one_rank(name) for name, _ in cases}
    for name, plan in cases:
        refuse_plan(CONFIGS[name], plan)

    def rank(_: int) -> list[dict[str, Any] | None]:
        torch.set_num_threads(1)
        return [tokens_on_ranks(name, Mesh(plan), requests(), SCARCE) for name, plan in cases]

    for (name, plan), found in zip(cases, run_local(rank, num_ranks, LIMIT_SECONDS)[0], strict=True):
        tokens, embedding, scores = expected[name]
        assert found["tokens"] == tokens, (name, plan.describe_axes())
        assert found["embedding"] == pytest.approx(embedding, abs=1e-6)
        assert found["scores"] == pytest.approx(scores, abs=1e-5)
        assert found["is_free"]
        assert found["preempted"] > 0 or plan.context.degree == 4
        if plan.data == 1:
            assert found["prefix"] > 0


@pytest.mark.processes
def test_two_ranks_give_the_tokens_of_one() -> None:
    check([("llama", TWO)], 2)
