"""Sampling: draws have exactly the distribution asked for, and depend on their seed alone; what a request must be."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from serving_for_tests import GREEDY, chi_square, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor

from weft.models import save_folder
from weft.serve.engine import Engine, EngineOptions
from weft.serve.head.sampling import Sampler, gumbel_noise, likeliest
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest

NUM_TOKENS, NUM_DRAWS = 12, 6000
LIMIT = 35.0  # of chi-square with 11 degrees of freedom: exceeded with a probability of 2e-4
SETTINGS = {
    "plain": Sampling(),
    "cold": Sampling(temperature=0.6),
    "top_k": Sampling(top_k=4),
    "top_p": Sampling(top_p=0.7),
    "min_p": Sampling(min_p=0.2),
    "all": Sampling(temperature=1.7, top_k=9, top_p=0.9, min_p=0.05),
    "changed": Sampling(
        repetition_penalty=1.5, presence_penalty=0.4, frequency_penalty=0.3, logit_bias={1: -100.0, 2: 1.5}
    ),
}
PROMPT, GENERATED = (3, 4), (5, 5, 6)


def exact(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution, token by token."""
    values = logits.double().tolist()
    for token, value in enumerate(values):
        if token in PROMPT + GENERATED:
            factor = sampling.repetition_penalty
            values[token] = value / factor if value > 0 else value * factor
        values[token] -= sampling.frequency_penalty * GENERATED.count(token)
        values[token] -= sampling.presence_penalty * (token in GENERATED)
        values[token] += sampling.logit_bias.get(token, 0.0)
    probabilities = (torch.tensor(values, dtype=torch.float64) / sampling.temperature).softmax(0)
    order = probabilities.argsort(descending=True)
    kept = order[: sampling.top_k or NUM_TOKENS]
    shares = probabilities[kept] / probabilities[kept].sum()
    kept = kept[(shares.cumsum(0) - shares) < sampling.top_p]
    kept = kept[probabilities[kept] >= sampling.min_p * probabilities.max()]
    result = torch.zeros_like(probabilities)
    result[kept] = probabilities[kept] / probabilities[kept].sum()
    return result


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.full(2)
def test_draws_of_many_seeds_have_the_exact_distribution(name: str) -> None:
    sampling, logits = SETTINGS[name], torch.randn(NUM_TOKENS) * 1.5
    request = Request("x", PROMPT, 9, sampling)
    members = [
        ActiveRequest(request, 0, 99, seed, [*PROMPT, *GENERATED], row=seed % NUM_DRAWS) for seed in range(NUM_DRAWS)
    ]
    sampler = Sampler(NUM_DRAWS, NUM_TOKENS, torch.device("cpu"))
    for active in members:
        sampler.admit(active)
    padded = torch.cat([logits, torch.tensor([99.0])]).expand(NUM_DRAWS, -1)  # no token behind the vocabulary is drawn
    tokens = sampler.sample(padded, members, torch.full((NUM_DRAWS,), 4)).tokens
    probabilities = exact(logits, sampling)
    counts = torch.bincount(tokens, minlength=NUM_TOKENS)
    assert chi_square(counts, probabilities) < LIMIT
    other = exact(logits, Sampling(temperature=0.9))  # the control: another distribution is told apart
    assert counts[other == 0].any() or float(((counts - other * NUM_DRAWS) ** 2 / (other * NUM_DRAWS)).sum()) > LIMIT


def test_noise_of_many_positions_is_gumbels_and_independent() -> None:
    positions = torch.arange(NUM_DRAWS)
    noise = gumbel_noise(torch.tensor([[77, 0]], dtype=torch.int32).expand(NUM_DRAWS, 2), positions, NUM_TOKENS)
    probabilities = torch.randn(NUM_TOKENS).softmax(0).double()
    counts = torch.bincount((noise + probabilities.log()).argmax(1), minlength=NUM_TOKENS)
    assert chi_square(counts, probabilities) < LIMIT
    assert float(noise.mean()) == pytest.approx(0.5772, abs=0.02)
    assert float(torch.corrcoef(torch.cat([noise[:-1].T, noise[1:].T])).fill_diagonal_(0).abs().max()) < 0.06


def test_a_seed_gives_its_tokens_in_any_company() -> None:
    model = tiny_model("llama")
    wanted = Request("x", (1, 2, 3), 8, Sampling(temperature=1.3, top_k=40, seed=5))
    others = [Request(str(i), (4, 5), 12, Sampling(seed=i if i else None)) for i in range(6)]
    alone = tokens_of(serve_all(make_engine(model), [wanted]))["x"]
    crowded = make_engine(model, num_blocks=8, max_running=4, token_budget=4, overlap=True)
    found = tokens_of(serve_all(crowded, [*others, wanted, Request("y", (1, 2, 3), 8, Sampling(1.3, 40, seed=6))], 2))
    assert crowded.state().num_preempted > 0
    assert found["x"] == alone != found["y"]
    free = [Request(name, (1, 2, 3), 8) for name in "ab"]
    assert len(set(map(tuple, tokens_of(serve_all(make_engine(model), free)).values()))) == 2


def test_a_temperature_near_zero_draws_the_likeliest_token() -> None:
    """Logits divided by it would be infinite, and equal."""
    logits = torch.tensor([[0.5, 2.0, 3.0, 1.0]])
    for more in ({}, {"top_k": 3}):
        sampling = Sampling(temperature=1e-40, **more)  # type: ignore[arg-type]
        member = ActiveRequest(Request("x", (1,), 9, sampling), 0, 99, 7, [1], row=0)
        assert Sampler(1, 4, torch.device("cpu")).sample(logits, [member], torch.tensor([1])).tokens.tolist() == [2]


def test_a_request_that_comes_again_in_another_row_leaves_its_token_there() -> None:
    sampler, logits, positions = Sampler(3, 4, torch.device("cpu")), torch.eye(4)[:1], torch.tensor([1])
    member = ActiveRequest(Request("x", (1,), 9, GREEDY), 0, 99, 7, [1], row=1)
    sampler.sample(logits, [member], positions)
    member.row = 2
    sampler.sample(torch.eye(4)[3:], [member], positions)
    assert sampler.last.tolist() == [0, 0, 3]


def test_penalties_are_those_of_transformers_also_after_pre_emption(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model, prompt = tiny_model("llama"), (1, 2, 3, 2)
    save_folder(tmp_path, model)  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id, theirs.generation_config.pad_token_id = None, 0
    ids = theirs.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=12, repetition_penalty=3.0)
    plain = Request("plain", prompt, 12, GREEDY)
    asked = Request("x", prompt, 12, Sampling(temperature=0, repetition_penalty=3.0))
    engine = make_engine(model, num_blocks=6, overlap=True)
    found = tokens_of(serve_all(engine, [plain, asked]))
    assert engine.state().num_preempted > 0
    assert found["x"] == ids[0, 4:].tolist() != found["plain"]


def test_the_likeliest_token_is_the_first_of_equal_ones_and_none_of_a_row_with_nan() -> None:
    logits = torch.randint(0, 50, (3, 641)).float()  # many are equal
    assert likeliest(logits).tolist() == [row.index(max(row)) for row in logits.tolist()]
    logits[0, 400] = torch.nan
    assert likeliest(logits).tolist() == [-1] + [row.index(max(row)) for row in logits[1:].tolist()]


NUMBERS = (
    *("temperature", "top_p", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
WRONG_SAMPLING: list[tuple[str, Any]] = [
    *((key, value) for key in NUMBERS for value in (None, "1", math.nan, math.inf, -1000.0, True, [1.0], 10**400)),
    *(("top_k", value) for value in (None, 1.5, "1", -1, True)),
    *(("num_logprobs", value) for value in (1.5, "1", -1, 62, True)),
    *(("seed", value) for value in (1.5, "1", math.nan)),
    *(("logit_bias", value) for value in (None, [1], "x", {"5": 1.0}, {5.0: 1.0}, {5: "1"}, {5: None}, {5: math.nan})),
    *(("logit_bias", {5: value}) for value in (math.inf, 1e39, 10**400, -(10**400), True)),
]
WRONG_REQUESTS: list[tuple[str, Any]] = [
    *(("max_tokens", value) for value in (None, 1.5, "1", math.nan, True)),
    *(("tokens", value) for value in (None, "ab", [1], (1.0,), ("1",), (None,), (True,))),
    *(("stop_tokens", value) for value in (None, [1], frozenset(["a"]), frozenset([1.0]))),
    *((key, value) for key in ("name", "tenant", "adapter") for value in (None, 1, "half a pair: \ud800")),
    *(("json_schema", value) for value in (1, {"type": "object"})),
    ("grammar", 1),
    ("sampling", None),
    ("sampling", {"temperature": 0}),
]


def reason_of(engine: Engine, request: Request) -> str | None:
    """Why the engine refuses a request; None if it takes it."""
    try:
        engine.add(request)
    except RequestError as error:
        return error.reason
    return None


def test_values_of_the_wrong_kind_are_refused_before_any_step_and_others_go_on() -> None:
    engine = Engine(tiny_model("llama"), EngineOptions(num_blocks=16))
    right = Request("right", (1, 2), 3, GREEDY)
    wrong = [replace(right, name="x", sampling=Sampling(**{key: value})) for key, value in WRONG_SAMPLING]
    wrong += [replace(replace(right, name="x"), **{key: value}) for key, value in WRONG_REQUESTS]
    engine.add(right)
    for request in wrong:
        assert reason_of(engine, request) == "invalid", request
    assert len(serve_all(engine, [])["right"]) == 3


def test_a_bias_may_be_a_whole_number_or_minus_infinity() -> None:
    engine = Engine(tiny_model("llama"), EngineOptions(num_blocks=16))
    for temperature in (0, 1e-9, 1.0):
        for other in ({}, {"top_k": 5}, {"top_p": 0.9}, {"min_p": 0.1}):
            bias = {5: 100, 6: -math.inf, np.int64(7): np.float32(1)} if temperature else {5: 10**9}
            sampling = Sampling(temperature=temperature, logit_bias=bias, **other)  # type: ignore[arg-type]
            found = serve_all(engine, [Request("x", (1, 2), 3, sampling)])["x"]
            assert [one.token for one in found] == [5, 5, 5]
