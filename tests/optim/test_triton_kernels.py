"""What GPUs run in Triton equals the plain functions, which the other tests hold: by Triton's interpreter, on a CPU.

Its casts to bf16 drop bits where a GPU rounds to nearest: what is cast, and not rounded at random, is off by a step.
"""

from __future__ import annotations

import pytest
from kernel_programs_for_tests import BF16_STEP, CLOSE, differences

pytestmark = pytest.mark.processes

pytest.importorskip("triton")  # which has packages for Linux alone


def test_an_update_is_the_plain_one_in_every_format() -> None:
    found = differences("updates")
    assert len(found) == 30
    for name, one in found.items():
        assert one["held"] <= CLOSE, name
        assert one["whole"] <= BF16_STEP, name
        assert (one["changed"] == 0) == name.endswith("nan"), name  # by a scale that is no number, nothing is


def test_the_loss_of_rows_and_their_gradient_are_the_plain_ones() -> None:
    found = differences("losses")
    assert len(found) == 16
    for name, one in found.items():
        assert one["total"] <= CLOSE, name
        assert one["rows"] <= (BF16_STEP if "bfloat16" in name else CLOSE), name
        assert one["beside"] == 0, name


def test_a_label_that_is_no_class_spoils_its_row_and_no_other() -> None:
    found = differences("labels")
    assert len(found) == 8
    for name, one in found.items():
        assert one == {"total": 1.0, "good": 0, "bad": 37}, name


def test_a_gradient_is_copied_and_its_squares_are_added_up() -> None:
    found = differences("takes")
    assert len(found) == 6
    for name, one in found.items():
        assert one["target"] == 0, name
        assert one["squares"] <= CLOSE, name


def test_rows_of_experts_are_moved_and_summed_as_by_the_plain_functions() -> None:
    found = differences("rows")
    assert len(found) == 4
    for name, one in found.items():
        assert one.pop("rows of other tokens") > 0.1, name
        assert one.pop("take_rows") == 0, name
        assert max(one.values()) <= (2 * BF16_STEP if "bfloat16" in name else CLOSE), (name, one)


def test_a_program_behind_two_to_the_31_elements_finds_its_own() -> None:
    for program, one in differences("offsets").items():
        assert one == dict.fromkeys(("take", "update"), int(program) * 8192)


def test_pools_and_their_gradients_are_torchs() -> None:
    found = differences("pools")
    assert len(found) == 18
    for name, one in found.items():
        assert one["by kernel"] == (not name.startswith("not")), name
        assert one["result"] == 0, name
        assert one["gradient"] <= CLOSE, name
