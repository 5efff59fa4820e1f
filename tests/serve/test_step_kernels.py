"""Kernels of a decode's chain equal the plain functions, by Triton's interpreter, on a CPU."""

from __future__ import annotations

import pytest
from kernel_programs_for_tests import BF16_STEP, differences

pytestmark = pytest.mark.processes
MODULE = "step_kernels_for_tests"


def test_attention_in_one_kernel_is_rotation_and_attention() -> None:
    found = differences("whole", MODULE)
    assert len(found) == 8
    for name, parts in found.items():
        assert parts.pop("not rotated") > 0.03, name  # the control
        assert parts.pop("again") == parts.pop("counts") == 0, name
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)


def test_the_kernel_finds_the_first_of_the_likeliest_tokens() -> None:
    found = differences("chosen_tokens", MODULE)
    assert len(found) == 3
    assert all(parts == {"differ": 0, "bad": 0, "first": 0} for parts in found.values())


def test_kernels_attend_to_the_pages_of_a_rank() -> None:
    found = differences("shares", MODULE)
    assert len(found) == 3
    for name, parts in found.items():
        assert parts.pop("without a rank") > 0.03, name  # the control
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)
