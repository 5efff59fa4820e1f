"""Constraints in words, and their messages."""

from __future__ import annotations

import pytest

from weft.errors import ConfigError
from weft.plan import Memory, Pipe, Plan, Shard, Tensor
from weft.planner.question import Question, parse_constraints, parse_count

PLAN = Plan(
    data=2,
    pipe=Pipe(4, "interleaved", chunks=2),
    shard=Shard(8, 2),
    tensor=Tensor(8, 1, sequence=True),
    micro_batch=2,
    memory=Memory("selective"),
)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("pipe=4", True),
        ("pipe = 4", True),
        ("pipe==2", False),
        ("tensor.x<=8", True),
        ("x<8", False),
        ("y>=1", True),
        ("recompute!=full", True),
        ("recompute=none", False),
        ("no recompute", False),
        ("no offload", True),
        ("offload<=0.5", True),
        ("offload>0.25", False),
        ("no context", True),
        ("no pipe", False),
        ("schedule=interleaved", True),
        ("stage=2", True),
        ("shard>7", True),
        ("sequence=true", True),
        ("no sequence", False),
        ("micro_batch<=2", True),
        ("chunks=2", True),
        ("exact only", True),
        ("precision=fp32", True),
    ],
)
def test_words(text: str, holds: bool) -> None:
    (constraint,) = parse_constraints([text])
    assert constraint.holds(PLAN) is holds
    assert constraint.text == text


def test_several_in_one_text() -> None:
    found = parse_constraints(["pipe=4, x<=8", "no recompute"])
    assert [one.text for one in found] == ["pipe=4", "x<=8", "no recompute"]
    assert [one.is_inner for one in found] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pip=4", "a plan has no 'pip'; did you mean 'pipe'"),
        ("pipe", "'pipe' is not understood; write a field of the plan and a value"),
        ("pipe=four", "'four' is not a whole number"),
        ("pipe=99999999999", "is not a whole number"),
        ("recompute=some", "'some' is not one of none, selective, full"),
        ("recompute<full", "memory.recompute is not a number, so only = and != compare it"),
        ("sequence=yes", "'yes' is not true or false"),
        ("offload=all", "'all' is not a number"),
        ("no micro_batch", "axes, recompute, offload and sequence can be left out"),
        ("no schedule", "axes, recompute, offload and sequence can be left out"),
    ],
)
def test_what_is_not_understood(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_constraints([text])


@pytest.mark.parametrize(("text", "count"), [("4M", 4 << 20), ("512", 512), ("3k", 3072), ("1G", 1 << 30)])
def test_counts(text: str, count: int) -> None:
    assert parse_count(text, "--tokens-per-step") == count


@pytest.mark.parametrize("text", ["0", "4X", "-1", "1.5M", "", "9" * 16])
def test_no_counts(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--tokens-per-step .* is not a whole number above 0"):
        parse_count(text, "--tokens-per-step")


def test_an_empty_batch() -> None:
    with pytest.raises(ConfigError, match="a batch of 0 sequences of 8 tokens is empty"):
        Question(0, 8)
