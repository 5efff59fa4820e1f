"""Every field of the plan, constrained to every kind of value but its default: a plan, or the reason in words."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from weft.cluster.hardware import load
from weft.data.config import ImageShape
from weft.errors import ConfigError
from weft.models import GPT2Config
from weft.models.vision import DeepResNetConfig
from weft.plan import Plan
from weft.planner.asked import AskedFields
from weft.planner.explain import why
from weft.planner.image_model import planned_images
from weft.planner.model import planned_model
from weft.planner.question import LIST, Question, _fields, _kind_of, asked_fields, parse_constraints
from weft.planner.search import Model, search
from weft.profiling.software import Software

TINY = GPT2Config(vocab_size=1024, n_positions=128, n_embd=64, n_layer=4, n_head=4)
BATCH, SEQUENCE = 8, 128


@lru_cache(maxsize=1)
def model() -> Model:
    return planned_model(TINY, SEQUENCE, load("h100:1x4"), Software())


def values(name: str) -> list[Any]:
    """Some values of a field, as a constraint states them; none of a list of any names."""
    kind = _kind_of(name, name)
    if kind is bool:
        return ["true", "false"]
    if isinstance(kind, tuple):
        return list(kind[1:] if kind[0] == LIST else kind)
    return {int: [2, 3], float: [0.5, 0.33], str: ["h.2"]}[kind]


def is_default(text: str) -> bool:
    (one,) = parse_constraints([text])
    return one.holds(Plan(precision="bf16"))


CASES = [f"{name}={value}" for name in _fields() for value in values(name)]
CASES = [text for text in CASES if not is_default(text)]


@pytest.mark.parametrize("text", CASES)
@pytest.mark.sampled(8)
def test_each_value_of_each_field_has_a_plan_or_a_reason(text: str) -> None:
    check(text)


IMAGE = ImageShape(64, 64, 3)


@lru_cache(maxsize=1)
def image_model() -> Model:
    return planned_images(DeepResNetConfig(depth=8, version=1, width=8, norm="group"), IMAGE, "fp32", load("h100:1x4"))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("tile.rows=2", ""),
        ("tile.columns=4", ""),
        ("tile.degree=4", ""),
        ("tile.rows>1", ""),
        ("tile.fused=2", ""),
        ("tile.until=stage3.0", ""),
        ("tile.hand_over=batch", ""),
        ("tile.columns=3", "plans with tile.columns = 1, 2, 4 were tried"),
        ("tile.degree>4", "plans with tile.degree = 1, 2, 4 were tried"),
        ("tile.fused=3", "plans with tile.fused = 1, 2, 4 were tried"),
        ("tile.until=layer9", "plans with tile.until = '', stage2.0, stage3.0 were tried"),
    ],
)
@pytest.mark.sampled(2)
@pytest.mark.full
def test_each_field_of_tiles_has_a_plan_or_a_reason(text: str, reason: str) -> None:
    found = check_search(image_model(), Question(BATCH, 1, "fp32", parse_constraints([text]), IMAGE), text)
    assert reason in found
    assert bool(reason) == bool(found)


def check(text: str, *more: str) -> str:
    """Returns the reason why no plan satisfies the constraints; empty if one does."""
    return check_search(model(), Question(BATCH, SEQUENCE, constraints=parse_constraints([text, *more])), text)


def check_search(model: Model, question: Question, text: str) -> str:
    found = search(model, question, keep=2)
    assert all(one.holds(candidate.plan) for candidate in found.best for one in question.constraints)
    assert bool(found.best) != (text in found.unmet)
    if found.best:
        return ""
    reason = found.unmet[text]
    assert why(model, question, found).startswith(f"No plan satisfies '{text}': {reason}. Without it the best is ")
    return reason


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("memory.keep_collectives=true", ""),
        ("memory.offload=0.33", ""),
        ("pipe.in_flight<=1", ""),
        ("memory.activations>0.4", ""),
        ("pipe=3", "plans with pipe.degree = 1, 2, 4 were tried"),
        ("micro_batch>64", "plans with micro_batch = 1, 2, 4, 8 were tried"),
        ("memory.master=false", "keeps less of each update than fp32 does, and plan.exact = true"),
        ("memory.state!=master", "memory.state = 'bf16' keeps less of each update"),
        ("memory.activations>1", "a share lies between 0 and 1"),
        ("offload>1", "a share lies between 0 and 1"),
        ("expert=2", "expert"),
        ("tile.rows=2", "tile"),
    ],
)
def test_what_cannot_be_is_said_with_its_reason(text: str, reason: str) -> None:
    found = check(text)
    assert reason in found
    assert bool(reason) == bool(found)


def test_the_value_that_satisfies_a_constraint_and_is_nearest_to_the_default_is_asked_for() -> None:
    def asked(*texts: str) -> dict[str, Any]:
        return asked_fields(parse_constraints(texts))

    assert asked("memory.activations<=0.5", "memory.state!=int8", "pipe.in_flight!=3") == {}
    assert asked("memory.activations>=0.5") == {"memory.activations": 0.5}
    assert asked("pipe.in_flight<3") == {"pipe.in_flight": 2}
    assert asked("memory.state!=master") == {"memory.state": "bf16"}
    assert asked("memory.accumulate=whole") == {"memory.accumulate": "whole"}
    with pytest.raises(ConfigError, match=r"'memory.activations>0.5' and 'memory.activations<0.5' leave no "):
        asked("memory.activations>0.5", "memory.activations<0.5")


def test_lists_are_compared_with_one_member_or_refused() -> None:
    (one,) = parse_constraints(["expert_over=x"])
    assert one.value == ("x",)
    with pytest.raises(ConfigError, match=r"the field is a list, so 'h.2' cannot be compared; use a value in a plan"):
        parse_constraints(["pipe.split=h.2"])


def test_a_constraint_that_some_plan_satisfies_is_met() -> None:
    asked = AskedFields(parse_constraints(["x=2", "x=3"]))
    assert not asked.holds_inner(Plan())
    assert [asked.is_met(one) for one in asked.inner] == [False, False]
    assert not asked.holds_inner(Plan(tensor=type(Plan().tensor)(2)))
    assert [asked.is_met(one) for one in asked.inner] == [True, False]
