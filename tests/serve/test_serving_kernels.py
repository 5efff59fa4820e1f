"""Kernels of the engine equal the plain functions, by Triton's interpreter, on a CPU."""

from __future__ import annotations

import pytest
from kernel_programs_for_tests import BF16_STEP, differences

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(
    ("case", "number"),
    [
        ("decodes", 8),
        ("tiles", 4),
        ("serving", 13),
        ("packed", 28),
        ("four_bits", 5),
        ("four_bit_prompts", 9),
        ("filters", 3),
        ("chosen", 3),
    ],
)
def test_kernels_are_the_plain_functions(case: str, number: int) -> None:
    found = differences(case)
    assert len(found) == number
    for name, parts in found.items():
        if "without a tail" in parts:  # the control: keys of the last page are lost
            assert parts.pop("without a tail") > 0.03, name
            assert parts.pop("pages") == 0, name
        if "a key too many" in parts:
            assert parts.pop("a key too many") > 0.03, name
        if "to all tokens" in parts:
            assert parts.pop("to all tokens") > 0.03, name
            assert parts.pop("choices that differ") == 0, name
        if "scales of other outputs" in parts:
            assert parts.pop("scales of other outputs") > 0.03, name
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else 2 * BF16_STEP), (name, part)


def test_ranges_of_numbers_beyond_16_bits_are_those_of_the_plain_function() -> None:
    assert differences("ranges") == {"4 bits": {"differ": 0, "not finite": 0}}
