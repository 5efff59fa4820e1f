"""The ranks of `context` hold the keys and values of each request together: tokens and logits are those of one rank,
and Loki chooses the tokens that one rank would choose.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any
from unittest.mock import patch

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
from weft.serve.attention import choice, formats
from weft.serve.attention.batch import PageShare
from weft.serve.attention.choice import LokiChoice, choice_calls
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.engine import Engine, EngineOptions
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.parallel.traffic import ServedSizes, step_calls

ENDS = (9, 20, *range(21, 41))  # of two chunks, and of decodes
BLOCKS = (5, 0, 3, 1, 7, 2, 4, 6, 9, 8)  # anywhere in the cache
CHOICE = LokiChoice(dims=0.5, tokens=0.6, newest=1, dense_below=3)
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


def loki_of(name: str, choice: LokiChoice = CHOICE) -> CacheFormat:
    """Axes that mix all dims, of each layer and key head of a tiny model."""
    sizes = ServedSizes.of(CONFIGS[name])
    shape = (sizes.num_layers, sizes.num_key_heads, sizes.head_dim, sizes.head_dim)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return CacheFormat(loki=Loki(torch.linalg.qr(drawn)[0], choice))


def ends_of(name: str) -> tuple[int, ...]:
    return tuple(end for end in ENDS if end <= 32) if name == "gpt2" else ENDS  # as many positions as it has


def as_tensor(rows: list[Any]) -> Tensor:
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("degree", "cases"),
    [
        (2, [*(("plain", name) for name in ("llama", "mistral", "gpt2")), ("loki", "llama"), ("loki", "mistral")]),
        pytest.param(4, [("plain", "llama"), ("loki", "gpt2")], marks=pytest.mark.soak),
    ],
)
def test_logits_and_traffic_are_as_stated_and_mistakes_are_noticed(degree: int, cases: list[tuple[str, str]]) -> None:
    """Logits equal those of one rank to 1e-12, and have the same bits on all ranks. Each rank has its share of the
    pages. Negative controls: what rank 1 computes of its own pages is dropped; of Loki, scores are relative to the best
    of a rank's own tokens.
    """
    plan, steps = Plan(context=Context(degree)), {"prompt": (0, 9), "decode": (19, 20)}

    def part_on(cache: str, name: str, page_size: int, ranks: ServingRanks | None = None) -> ModelPart:
        model, form = whole_model(name) if ranks is None else part_of(name, ranks.place), loki_of(name)
        options = EngineOptions(block_size=page_size, num_blocks=10, context_length=48)
        return ModelPart(model, replace(options, cache=form) if cache == "loki" else options, ranks)

    def rank(index: int) -> list[dict[str, Any]]:
        torch.set_num_threads(1)
        mesh, found = Mesh(plan), list[dict[str, Any]]()
        ranks, merged, gathered = ServingRanks(mesh), formats.merged, choice.gathered

        def dropped(own: Tensor, axis: Any, dtype: torch.dtype) -> Tensor:
            if index == 1 and len(own) == 1:
                own[..., -1] = -torch.inf
            return merged(own, axis, dtype)

        def of_own_tokens(own: Tensor, axis: Any) -> Tensor:
            return own[None] if own.shape[-1] == 1 else gathered(own, axis)

        for cache, name in cases:
            part, calls = part_on(cache, name, 4 // degree, ranks), []
            logits = logits_of(part, ends_of(name), BLOCKS).tolist()
            for begin, end in steps.values():
                mesh.ledger.clear()
                part.logits(step_of(range(20), begin, end, BLOCKS[:5], 4))
                calls.append({"/".join(key): [one.calls, one.num_bytes] for key, one in mesh.ledger.entries().items()})
            wrong = []
            for module, mistake in ((formats, {"merged": dropped}), (choice, {"gathered": of_own_tokens})):
                with patch.multiple(module, **mistake):
                    wrong.append(logits_of(part, ends_of(name), BLOCKS).tolist())
            pages = sum(page.nbytes for layer in part.cache for page in layer.pages)
            found.append({"logits": logits, "calls": calls, "wrong": wrong, "pages": pages})
        return found

    for _, name in cases:
        refuse_plan(CONFIGS[name], plan)
    found = run_local(rank, degree, LIMIT_SECONDS)
    for (cache, name), *on_ranks in zip(cases, *found, strict=True):
        whole, sizes = part_on(cache, name, 4), ServedSizes.of(CONFIGS[name])
        expected = logits_of(whole, ends_of(name), BLOCKS)
        num_bytes = sum(page.nbytes for layer in whole.cache for page in layer.pages)
        for own in on_ranks:
            torch.testing.assert_close(as_tensor(own["logits"]), expected, atol=1e-12, rtol=0)
            assert own["logits"] == on_ranks[0]["logits"]
            assert degree * own["pages"] == num_bytes
            without, apart = ((as_tensor(rows) - expected).abs().amax(1) for rows in own["wrong"])
            assert without[:2].max() < 1e-12  # of chunks
            assert not bool((without[2:] < 1e-3).all())  # of decodes; NaN where no other rank has chosen tokens
            assert (apart.max() > 1e-3) == (cache == "loki" and sizes.num_heads > sizes.num_key_heads)
            for (begin, end), calls in zip(steps.values(), own["calls"], strict=True):
                stated = list(step_calls(sizes, plan, 0, end - begin, 1, 8))
                if cache == "loki" and end - begin == 1:
                    heads, pages = (sizes.num_heads, sizes.num_key_heads), (5, degree, 4 // degree)
                    stated += sizes.num_layers * list(choice_calls(CHOICE, 1, heads, pages, 8))
                counts, sums = Counter("/".join(key) for key, _ in stated), Counter[str]()
                for key, size in stated:
                    sums["/".join(key)] += size
                assert counts  # of all layers
                assert calls == {key: [counts[key], sums[key]] for key in counts}
        if cache == "loki":
            dense = EngineOptions(
                block_size=4, num_blocks=10, context_length=48, cache=loki_of(name, LokiChoice(tokens=1.0))
            )
            every = logits_of(ModelPart(whole_model(name), dense), ends_of(name), BLOCKS)
            assert (every - expected)[2:].abs().max() > 1e-3


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
