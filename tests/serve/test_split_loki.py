"""Loki over pages that the ranks of `context` hold together chooses the tokens that one rank would choose."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import (
    LIMIT_SECONDS,
    logits_of,
    part_of,
    requests,
    step_of,
    tokens_on_ranks,
    whole_model,
)
from serving_for_tests import CONFIGS, serve_all, tokens_of
from torch import Tensor

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Context, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.attention import choice as choice_module
from weft.serve.attention.choice import LokiChoice, choice_calls
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.parallel.traffic import ServedSizes, step_calls

pytestmark = pytest.mark.processes

CHOICE = LokiChoice(dims=0.5, tokens=0.6, newest=1, dense_below=3)
ENDS = (9, 20, *range(21, 41))  # two chunks, and decodes
BLOCKS = (5, 0, 3, 1, 7, 2, 4, 6, 9, 8)


def loki(name: str, choice: LokiChoice = CHOICE) -> Loki:
    """Axes that mix all dims, of each layer and key head of a tiny model."""
    sizes = ServedSizes.of(CONFIGS[name])
    shape = (sizes.num_layers, sizes.num_key_heads, sizes.head_dim, sizes.head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return Loki(torch.linalg.qr(drawn)[0], choice)


def options(name: str, page_size: int, choice: LokiChoice = CHOICE) -> EngineOptions:
    return EngineOptions(
        block_size=page_size, num_blocks=10, context_length=48, cache=CacheFormat(loki=loki(name, choice))
    )


@pytest.mark.parametrize(("name", "degree"), [("llama", 2), ("mistral", 2), ("gpt2", 4)])
def test_logits_are_those_of_one_rank_and_traffic_is_as_stated(name: str, degree: int) -> None:
    """Negative controls: scores relative to the best of a rank's own tokens, and all tokens chosen."""
    plan, sizes = Plan(context=Context(degree)), ServedSizes.of(CONFIGS[name])
    ends = tuple(end for end in ENDS if end <= 32) if name == "gpt2" else ENDS  # as many positions as it has
    expected = logits_of(ModelPart(whole_model(name), options(name, 4)), ends, BLOCKS)
    dense = logits_of(ModelPart(whole_model(name), options(name, 4, LokiChoice(tokens=1.0))), ends, BLOCKS)
    refuse_plan(CONFIGS[name], plan)

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh = Mesh(plan)
        ranks = ServingRanks(mesh)
        part = ModelPart(part_of(name, ranks.place), options(name, 4 // degree), ranks)
        logits = logits_of(part, ends, BLOCKS).tolist()
        mesh.ledger.clear()
        part.logits(step_of(range(20), 19, 20, BLOCKS[:5], 4))
        calls = {"/".join(key): [one.calls, one.num_bytes] for key, one in mesh.ledger.entries().items()}
        whole = choice_module.gathered
        choice_module.gathered = lambda own, axis: own[None] if own.shape[-1] == 1 else whole(own, axis)
        return logits, calls, logits_of(part, ends, BLOCKS).tolist()

    heads, pages = (sizes.num_heads, sizes.num_key_heads), (5, degree, 4 // degree)
    stated = [*step_calls(sizes, plan, 0, 1, 1, 8)]
    stated += sizes.num_layers * list(choice_calls(CHOICE, 1, heads, pages, 8))
    counts = Counter("/".join(key) for key, _ in stated)
    for logits, calls, wrong in run_local(rank, degree, LIMIT_SECONDS):
        torch.testing.assert_close(as_tensor(logits), expected, atol=1e-12, rtol=0)
        assert calls == {key: [number, sum(size for _, size in stated)] for key, number in counts.items()}
        if sizes.num_heads > sizes.num_key_heads:
            assert (as_tensor(wrong) - expected).abs().max() > 1e-3
    assert (dense - expected)[2:].abs().max() > 1e-3


def as_tensor(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


def test_answers_are_those_of_one_rank_beside_x_with_chunks_and_too_few_blocks() -> None:
    plan = Plan(context=Context(2), tensor=TensorDegrees(2))
    given = EngineOptions(block_size=4, num_blocks=60, cache=CacheFormat(loki=loki("llama")))
    expected = tokens_of(serve_all(Engine(whole_model("llama"), given), requests()))
    refuse_plan(CONFIGS["llama"], plan)

    def rank(_: int) -> Any:
        torch.set_num_threads(1)
        sizes = {"num_blocks": 7, "token_budget": 4, "max_running": 4}
        scarce = EngineOptions(block_size=2, cache=CacheFormat(loki=loki("llama")), **sizes)  # type: ignore[arg-type]
        return tokens_on_ranks("llama", Mesh(plan), requests(), scarce)

    found = run_local(rank, 4, LIMIT_SECONDS)[0]
    assert found["tokens"] == expected
    assert found["preempted"] > 0
