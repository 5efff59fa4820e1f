"""Kernels for operands in fp8 equal the plain functions, by Triton's interpreter on a CPU."""

from __future__ import annotations

import pytest
from kernel_programs_for_tests import differences

pytestmark = pytest.mark.processes

pytest.importorskip("triton")  # which has packages for Linux alone


def test_operands_are_prepared_as_by_the_plain_functions() -> None:
    found = dict(differences("operands", "fp8_kernels_for_tests"))
    assert len(found) == 10
    assert found.pop("other order")[0] > 8
    for name in ("turn_rows in place", "turn_rows gathered"):  # bytes are moved
        assert found.pop(name) == [0.0]
    for name, (values, *others) in found.items():
        assert values <= 1, name  # a step of fp8, or a factor itself
        assert all(one <= 1e-6 for one in others), (name, others)
    assert max(found["row_factors"]) <= 1e-6


def test_products_are_those_of_the_plain_functions() -> None:
    found = differences("products", "fp8_kernels_for_tests")
    assert len(found) == 2
    for name, (right, of_other_rows) in found.items():
        assert right <= 2**-7, name  # the interpreter's casts to bf16 drop bits
        assert of_other_rows > 0.5, name
