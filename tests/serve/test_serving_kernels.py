"""Kernels of the engine equal the plain functions, by Triton's interpreter, on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
from kernel_programs_for_tests import BF16_STEP, differences

pytestmark = pytest.mark.processes
STEPS, EXPERTS = "step_kernels_for_tests", "expert_kernels_for_tests"
CONTROLS = (  # what a mistake would give
    *("without a tail", "a key too many", "to all tokens", "scales of other outputs", "not rotated", "without a rank"),
    *("codes of other experts", "other weights", "not normed", "order of others"),
)
EXACT = ("pages", "choices that differ", "again", "counts", "order", "experts")  # other bits are none


def check(found: dict[str, Any], steps: float = 1.0) -> None:
    for name, parts in found.items():
        for part, difference in parts.items():
            if part in CONTROLS:
                assert difference > 0.03, (name, part)
            elif part in EXACT:
                assert difference == 0, (name, part)
            else:
                assert difference <= (1e-5 if "float32" in name else steps * BF16_STEP), (name, part)


@pytest.mark.parametrize(
    ("case", "number", "control"),
    [
        ("decodes", 8, None),
        ("tiles", 4, "a key too many"),
        ("serving", 13, None),
        ("packed", 28, "scales of other outputs"),
        ("four_bits", 5, "without a tail"),
        ("four_bit_prompts", 9, "without a tail"),
        ("filters", 3, None),
        ("chosen", 3, "to all tokens"),
    ],
)
def test_kernels_are_the_plain_functions(case: str, number: int, control: str | None) -> None:
    found = differences(case)
    assert len(found) == number
    assert control is None or all(control in parts for parts in found.values())
    check(found, 2.0)


def test_ranges_of_numbers_beyond_16_bits_are_those_of_the_plain_function() -> None:
    assert differences("ranges") == {"4 bits": {"differ": 0, "not finite": 0}}


def test_attention_in_one_kernel_and_to_pages_of_a_rank_is_the_plain_one() -> None:
    for case, number, control in (("whole", 8, "not rotated"), ("shares", 3, "without a rank")):
        found = differences(case, STEPS)
        assert len(found) == number
        assert all(control in parts for parts in found.values())
        check(found)


def test_the_kernel_finds_the_first_of_the_likeliest_tokens() -> None:
    found = differences("chosen_tokens", STEPS)
    assert len(found) == 3
    assert all(parts == {"differ": 0, "bad": 0, "first": 0} for parts in found.values())


@pytest.mark.parametrize(("case", "number"), [("experts", 5), pytest.param("more_experts", 10, marks=pytest.mark.soak)])
def test_products_with_codes_of_chosen_experts_are_those_with_dequantised_weights(case: str, number: int) -> None:
    found = differences(case, EXPERTS)
    assert len(found) == number
    assert {name.partition(" torch")[0] for name in found} == {"tiles", "few rows", "token"}
    assert all("codes of other experts" in parts for parts in found.values())
    assert any({"added", "rows", "other weights"} <= parts.keys() for parts in found.values())
    check(found)


def test_routers_and_the_order_of_rows_are_those_of_plain_functions() -> None:
    found = differences("routes", EXPERTS)
    assert len(found) == 3
    assert all({"experts", "order", "not normed", "order of others"} <= parts.keys() for parts in found.values())
    check(found)
