"""What a request must be is checked when the engine takes it: nothing else stands before the step of all requests."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
from serving_for_tests import GREEDY, serve_all, tiny_model

from weft.serve.engine import Engine, EngineOptions
from weft.serve.scheduling.request import Request, RequestError, Sampling

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
    *((key, value) for key in ("name", "tenant", "adapter") for value in (None, 1)),
    *(("json_schema", value) for value in (1, {"type": "object"})),
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
