"""The ranks of `context` hold the keys and values of each request together: tokens and logits are those of one rank."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import (
    LIMIT_SECONDS,
    check,
    logits_of,
    on_one_rank,
    part_of,
    requests,
    step_of,
    whole_model,
)
from serving_for_tests import CONFIGS, draft_always, serve_all, tokens_of
from torch import Tensor

from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Context, Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.attention.batch import PageShare
from weft.serve.attention.plain import PlainPages
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.parallel.traffic import ServedSizes, step_calls

SEQUENCE = ((7, 13, 14, 15, 16), (5, 0, 3, 1))  # two chunks and three decodes, in blocks anywhere in the cache
TWO = Plan(context=Context(2))
# Sliding windows, learned positions, norms of heads, and other axes beside.
FOUR_RANKS = [
    ("mistral", Plan(context=Context(2), tensor=TensorDegrees(2))),
    ("gpt2", Plan(context=Context(2), pipe=Pipe(2))),
    ("qwen3", Plan(context=Context(4))),
    ("mixtral", Plan(context=Context(2), expert=2)),
    ("llama", Plan(context=Context(2), data=2)),
    ("qwen2", Plan(context=Context(2), tensor=TensorDegrees(1, 2))),
]


@pytest.mark.processes
def test_two_ranks_give_the_tokens_of_one() -> None:
    check([("llama", TWO)], 2)


@pytest.mark.processes
@pytest.mark.parametrize("one_in", [3, pytest.param(1, marks=pytest.mark.soak)])
def test_four_ranks_beside_other_axes(one_in: int) -> None:
    check(FOUR_RANKS[::one_in], 4)


@pytest.mark.processes
def test_logits_and_traffic_are_as_stated_and_a_dropped_part_is_noticed() -> None:
    """Logits equal those of one rank to 1e-12, and have the same bits on all ranks. Negative control: what rank 1
    computes of its own pages is dropped. Each rank has half of the pages.
    """
    names = ("llama", "mistral", "gpt2")
    options = EngineOptions(block_size=4, num_blocks=6)
    expected = {name: logits_of(ModelPart(whole_model(name), options), *SEQUENCE) for name in names}
    for name in names:
        refuse_plan(CONFIGS[name], TWO)

    def rank(index: int) -> dict[str, Any]:
        torch.set_num_threads(1)
        mesh = Mesh(TWO)
        ranks = ServingRanks(mesh)
        parts = {name: ModelPart(part_of(name, ranks.place), replace(options, block_size=2), ranks) for name in names}
        pages = sum(page.nbytes for layer in parts["llama"].cache for page in layer.pages)
        logits = {name: logits_of(part, *SEQUENCE).tolist() for name, part in parts.items()}
        mesh.ledger.clear()
        inputs = step_of(tuple(range(9)), 0, 5, [0, 1], 4)
        assert parts["llama"].logits(inputs) is not None
        calls = {"/".join(key): [one.calls, one.num_bytes] for key, one in mesh.ledger.entries().items()}
        whole = PlainPages.attend

        def dropped(*given: Any) -> Tensor:
            part = whole(*given)
            if index == 1 and given[4].num_decodes:
                part[..., -1] = -torch.inf
            return part

        PlainPages.attend = dropped  # type: ignore[method-assign]
        wrong = logits_of(parts["llama"], *SEQUENCE).tolist()
        return {"logits": logits, "wrong": wrong, "calls": calls, "pages": pages}

    found = run_local(rank, 2, LIMIT_SECONDS)
    for name, logits in expected.items():
        torch.testing.assert_close(
            torch.tensor(found[0]["logits"][name], dtype=torch.float64), logits, atol=1e-12, rtol=0
        )
        assert found[0]["logits"][name] == found[1]["logits"][name]
    wrong = (torch.tensor(found[0]["wrong"], dtype=torch.float64) - expected["llama"]).abs().amax(1)
    assert wrong[:2].max() < 1e-12  # of chunks
    assert wrong[2:].min() > 1e-3  # of decodes
    stated = list(step_calls(ServedSizes.of(CONFIGS["llama"]), TWO, 0, 5, 1, 8))
    counts, sums = Counter("/".join(key) for key, _ in stated), Counter[str]()
    for key, num_bytes in stated:
        sums["/".join(key)] += num_bytes
    assert counts  # of both layers
    for one in found:
        assert one["calls"] == {key: [counts[key], sums[key]] for key in counts}
        whole = ModelPart(whole_model("llama"), options)
        assert 2 * one["pages"] == sum(page.nbytes for layer in whole.cache for page in layer.pages)


@pytest.mark.processes
def test_drafts_change_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of n-grams, and of a draft model, whose own cache has whole blocks."""
    draft_always(monkeypatch)
    expected = on_one_rank("llama")[0]
    refuse_plan(CONFIGS["llama"], TWO)

    def rank(_: int) -> list[Any]:
        torch.set_num_threads(1)
        found = []
        for speculate in ("ngram", whole_model("llama")):
            mesh = Mesh(TWO)
            ranks = ServingRanks(mesh)
            plain = EngineOptions(block_size=2, num_blocks=30, token_budget=16, max_running=4)
            options = replace(plain, speculate=speculate if ranks.is_lead else None)
            model = part_of("llama", ranks.place)
            if not ranks.is_lead:
                follow_steps(ModelPart(model, options, ranks))
                continue
            engine = Engine(model, options, ranks)
            tokens = tokens_of(serve_all(engine, requests()))
            engine.close()
            found.append([tokens, engine.state().num_accepted])
        return found

    for tokens, num_accepted in run_local(rank, 2, LIMIT_SECONDS)[0]:
        assert tokens == expected
        assert num_accepted > 0


@pytest.mark.parametrize(("degree", "page_size"), [(1, 4), (2, 2), (3, 5)])
def test_every_token_is_on_one_rank_and_shares_differ_by_a_page(degree: int, page_size: int) -> None:
    shares = [PageShare(index, degree, page_size) for index in range(degree)]
    size = degree * page_size
    for length in range(-2, 3 * size):
        counts = [int(share.count(torch.tensor(length))) for share in shares]
        assert sum(counts) == max(0, length)
        assert max(counts) - min(counts) <= page_size
    positions = torch.arange(3 * size)
    table = torch.tensor([4, 0, 2])
    slots = [share.own_slots(table[positions // size] * size + positions % size, -1) for share in shares]
    assert all(sorted(one[one >= 0].tolist()) == sorted(set(one[one >= 0].tolist())) for one in slots)
    assert (torch.stack(slots) >= 0).sum(0).tolist() == [1] * len(positions)
    for share, own in zip(shares, slots, strict=True):
        number = int(share.count(torch.tensor(len(positions))))
        there = table[:, None] * page_size + torch.arange(page_size)
        assert own[own >= 0].tolist() == there.flatten().tolist()  # own tokens lie in the order of their positions
        for end, window in ((7, None), (11, 3), (2, 9)):
            seen = share.sees(torch.tensor([end]), number, window)[0]
            low = 0 if window is None else max(0, end - window)
            assert seen.tolist() == [low <= at < end for at in positions[own >= 0].tolist()]


def test_what_is_not_split_by_sequence_is_refused_in_words() -> None:
    with pytest.raises(PlanError, match=r"serving takes .* plan.context"):
        refuse_plan(CONFIGS["llama"], Plan(context=Context(2, kind="all-to-all")))
