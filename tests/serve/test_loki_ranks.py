"""Loki on several ranks: the tokens of one rank under every axis, bytes as planned, wrong axes are noticed.

Tokens of answers choose whatever they are computed with, so memory, chunks, prefixes and drafts change no answer.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import LIMIT_SECONDS, part_of, requests, tokens_on_ranks, whole_model
from serving_for_tests import CONFIGS, draft_always, make_engine, serve_all, tiny_model, tokens_of
from torch import nn

from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, build
from weft.plan import Context, Pipe, Plan, Tensor
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, Loki, cache_format, model_identity, save_loki
from weft.serve.calibration.loki_calibration import calibrate
from weft.serve.costs import ServedCosts
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.model_part import ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.step_inputs import PageLayout, is_decode, step_inputs
from weft.serve.parallel.rank_part import RankPlace, cuts_of, own_key_heads, own_layers, refuse_plan
from weft.serve.scheduling.blocks import HeldBlocks
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk
from weft.serve.scheduling.speculation import EarlyLayers
from weft.serve.spec import ServingSpec

SCARCE = {"block_size": 4, "num_blocks": 8, "token_budget": 4, "max_running": 4}  # chunks, and too few blocks
CHOICE = LokiChoice(dims=0.5, tokens=0.3, newest=2, dense_below=4)
FOUR_RANKS = [
    ("llama", Plan(tensor=Tensor(4))),  # two ranks have the same key head, and choose each for its own queries
    ("qwen3-deep", Plan(pipe=Pipe(4))),
    ("mistral", Plan(pipe=Pipe(2), tensor=Tensor(2))),
    ("gpt2", Plan(tensor=Tensor(2, 2))),
    ("mixtral", Plan(expert=2, tensor=Tensor(2))),
    ("qwen2", Plan(data=2, tensor=Tensor(2))),
]
OVER_PAGES = ("mistral", Plan(context=Context(2), tensor=Tensor(2)))


@cache
def calibrated(name: str) -> Loki:
    texts = [torch.randint(0, 61, (3, 24), generator=torch.Generator().manual_seed(0))]
    return calibrate(whole_model(name), texts, CHOICE)[0]


def on_one_rank(name: str, times: int = 1) -> dict[str, list[int]]:
    """With `times`, by a model that has each key head so many times: the same function, whose queries choose apart."""
    model, form = whole_model(name), calibrated(name)
    if times > 1:
        model = with_key_heads_repeated(name, times)
        form = Loki(form.axes.repeat_interleave(times, 1), CHOICE)
    options = EngineOptions(block_size=4, num_blocks=60, cache=CacheFormat(loki=form))
    return tokens_of(serve_all(Engine(model, options), requests()))


def with_key_heads_repeated(name: str, times: int) -> nn.Module:
    config = CONFIGS[name]
    assert isinstance(config, DecoderConfig)
    number = config.num_key_value_heads
    model = build(replace(config, num_key_value_heads=times * number)).double().eval()
    values = whole_model(name).state_dict()
    for one in values:
        if ".k_proj." in one or ".v_proj." in one:
            values[one] = values[one].unflatten(0, (number, -1)).repeat_interleave(times, 0).flatten(0, 1)
    model.load_state_dict(values)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {"num_blocks": 8, "token_budget": 3, "max_running": 3},
        {"num_blocks": 8, "token_budget": 7, "max_running": 4, "swap_blocks": 5},
        {"token_budget": 5, "prefix_cache": False},
        {"speculate": "ngram"},
        {"speculate": EarlyLayers(1), "num_blocks": 12, "token_budget": 9},
        {"speculate": "itself", "token_budget": 17},
    ],
    ids=str,
)
def test_answers_depend_on_the_request_alone(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    alone = {}
    for one in requests():
        engine = make_engine(whole_model("llama"), cache=CacheFormat(loki=calibrated("llama")), num_blocks=60)
        alone |= tokens_of(serve_all(engine, [one]))
    if options.get("speculate") == "itself":
        options = {**options, "speculate": tiny_model("llama")}
    engine = make_engine(whole_model("llama"), cache=CacheFormat(loki=calibrated("llama")), **options)
    assert tokens_of(serve_all(engine, requests(), every=1)) == alone
    state = engine.state()
    assert state.num_preempted > 0 or options.get("num_blocks") != 8
    assert state.num_swapped > 0 or "swap_blocks" not in options
    assert state.num_drafted > 0 or "speculate" not in options
    assert state.num_prefix_tokens > 0 or "prefix_cache" in options
    assert alone != tokens_of(serve_all(make_engine(whole_model("llama")), requests()))  # it is not exact


def test_a_prompt_shares_no_block_with_an_answer() -> None:
    """Its tokens attend to all before them, those of an answer did not: a prompt that goes on with an answer gives what
    it gives alone, to the last bits; blocks of prompts are shared.
    """
    tokens, sampling = tuple(range(5, 18)), Sampling(temperature=0, num_logprobs=0)
    engine = make_engine(whole_model("llama"), cache=CacheFormat(loki=calibrated("llama")))
    [answer] = tokens_of(serve_all(engine, [Request("first", tokens, 12, sampling)])).values()
    longer = Request("longer", (*tokens, *answer, 3), 4, sampling)
    found = serve_all(engine, [longer])["longer"]
    assert engine.state().num_prefix_tokens == 12  # three blocks of the first prompt
    alone = make_engine(whole_model("llama"), cache=CacheFormat(loki=calibrated("llama")), prefix_cache=False)
    expected = serve_all(alone, [longer])["longer"]
    for one, two in zip(found, expected, strict=True):
        assert one.logprobs is not None
        assert two.logprobs is not None
        assert one.logprobs.token == pytest.approx(two.logprobs.token, abs=1e-12)


def test_tokens_of_answers_are_decodes_and_those_of_prompts_are_not() -> None:
    layout = PageLayout(4, 8, 2, torch.device("cpu"), answers_are_decodes=True)
    tables = ([3, 1, 2], [5, 6])
    held = [HeldBlocks(array("i", blocks), 0, b"", 0) for blocks in tables]
    prompt = (1, 2, 3, 4, 5)
    first, second = (
        ActiveRequest(Request(str(row), prompt, 9), row, 14, 0, [*prompt, 6, 7], held=held[row], row=row)
        for row in range(2)
    )
    chunks = [ScheduledChunk(first, 6, 7, True, (8, 9)), ScheduledChunk(second, 3, 7, True)]
    inputs = step_inputs(chunks, layout)
    assert inputs.queries == [1, 1, 1, 1, 1, 2]
    assert inputs.num_decodes == 5
    assert inputs.flat[0].tolist() == [7, 8, 9, 6, 7, 4, 5]  # two of the second request's prompt are last
    assert inputs.flat[2].tolist() == [6, 7, 8, 5, 6, 3, 4]
    assert inputs.tables[:, 0].tolist() == [7, 8, 9, 6, 7, 5]
    assert inputs.sampled == [0, 1, 2, 4]
    plain = step_inputs(chunks, replace(layout, answers_are_decodes=False))
    assert plain.queries == [3, 4]
    assert plain.sampled == [0, 1, 2, 6]
    of_prompt = ScheduledChunk(ActiveRequest(Request("p", (1, 2), 3), 2, 5, 0, [1, 2]), 1, 2, True)
    assert not is_decode(of_prompt, layout)
    assert is_decode(of_prompt, replace(layout, answers_are_decodes=False))


@pytest.mark.processes
@pytest.mark.parametrize("one_in", [2, pytest.param(1, marks=pytest.mark.soak)])
def test_four_ranks_give_the_tokens_of_one_under_every_axis(one_in: int) -> None:
    cases = [*FOUR_RANKS[::one_in], OVER_PAGES]
    expected = {name: on_one_rank(name, 2 if plan.tensor.x == 4 else 1) for name, plan in cases}
    for name, plan in cases:
        refuse_plan(CONFIGS[name], plan)

    def rank(_: int) -> list[Any]:
        torch.set_num_threads(1)
        return [served(name, plan) for name, plan in cases]

    def served(name: str, plan: Plan) -> Any:
        options = EngineOptions(**SCARCE, cache=CacheFormat(loki=calibrated(name)))  # type: ignore[arg-type]
        options = replace(options, block_size=options.block_size // plan.context.degree)
        return tokens_on_ranks(name, Mesh(plan), requests(), options)

    for (name, plan), found in zip(cases, run_local(rank, 4, LIMIT_SECONDS)[0], strict=True):
        assert found["tokens"] == expected[name], (name, plan.describe_axes())
        assert found["is_free"]
        assert found["preempted"] > 0


class OtherHeads(Loki):
    """The control: every rank takes the axes of the first heads."""

    def part(self, layers: range, key_heads: range) -> Loki:
        return Loki(self.axes[layers.start : layers.stop, : len(key_heads)], self.choice, self.identity)


@pytest.mark.processes
def test_axes_of_other_heads_and_files_of_other_models_are_noticed_and_bytes_are_as_planned(tmp_path: Path) -> None:
    plan, path = Plan(tensor=Tensor(2)), tmp_path / "axes"
    right = calibrated("llama")
    save_loki(path, right)
    expected = {name: on_one_rank("llama")[name] for name in ("0", "1", "2", "3")}
    given = requests()[:4]
    refuse_plan(CONFIGS["llama"], plan)
    other = Loki(right.axes, CHOICE, model_identity(tiny_model("llama", seed=1)))
    staged = Plan(pipe=Pipe(2))

    def rank(_: int) -> Any:
        torch.set_num_threads(1)
        wrong = OtherHeads(right.axes, CHOICE, right.identity)
        options = EngineOptions(**SCARCE, cache=CacheFormat(loki=wrong))  # type: ignore[arg-type]
        tokens = tokens_on_ranks("llama", Mesh(plan), given, options)
        refusals, held = [], []
        for case in (plan, staged):
            ranks = ServingRanks(Mesh(case))
            try:
                options = EngineOptions(block_size=4, num_blocks=7, cache=CacheFormat(loki=other))
                ModelPart(part_of("llama", ranks.place), options, ranks)
            except ConfigError as error:
                refusals.append(str(error))
            form = cache_format(f"loki={path}")
            part = ModelPart(part_of("llama", ranks.place).float(), EngineOptions(num_blocks=7, cache=form), ranks)
            held.append(sum(page.numel() * page.itemsize for layer in part.cache for page in layer.pages))
        return tokens, refusals, held

    found = run_local(rank, 2, LIMIT_SECONDS)
    assert found[0][0]["tokens"] != expected
    for _, refusals, held in found:
        assert len(refusals) == 2
        assert all("is of another model; run weft calibrate" in words for words in refusals)
        for case, num_bytes in zip((plan, staged), held, strict=True):
            costs = ServedCosts(CONFIGS["llama"], case, 4, ServingSpec(cache=f"loki={path}"))
            assert num_bytes == 8 * 16 * costs.cache_bytes(0)  # seven blocks, and that of padding


@pytest.mark.parametrize(
    ("name", "plan"),
    [*FOUR_RANKS, ("gpt2", Plan(pipe=Pipe(2), tensor=Tensor(1, 2)))],
    ids=[f"{name} {plan.describe_axes()}" for name, plan in FOUR_RANKS] + ["gpt2 pipe and y"],
)
def test_parts_add_up_to_the_identity_of_the_whole(name: str, plan: Plan) -> None:
    whole = whole_model(name)
    places = []
    for index in range(plan.num_ranks // plan.data):
        left, coordinates = index, dict.fromkeys(plan.degrees, 0)
        for axis in ("pipe", "expert", "x", "y"):
            degree = {"pipe": plan.pipe.degree, "expert": plan.expert}.get(axis) or getattr(plan.tensor, axis)
            left, coordinates[axis] = divmod(left, degree)
        places.append(RankPlace(plan, coordinates))
    totals = list[int]()
    parts = [(part_of(name, place), place) for place in places]

    def add(number: int) -> int:
        totals.append(number)
        return sum(totals) % (1 << 64)

    found = [model_identity(part, cuts_of(part, place), add) for part, place in parts]  # type: ignore[arg-type]
    assert found[-1] == model_identity(whole) == model_identity(whole.bfloat16())
    assert found[0] != found[-1] or name == "mixtral"  # whose vectors are all on the first rank
    assert model_identity(tiny_model(name, seed=1)) != found[-1]
    held = [(layer, head) for _, place in parts for layer in own_layers(whole.config, place)
            for head in own_key_heads(whole.config, place)]  # fmt: skip
    assert set(held) == {(layer, head) for layer in range(calibrated(name).axes.shape[0])
                         for head in range(calibrated(name).axes.shape[1])}  # fmt: skip
