"""Kernels of experts in fewer bits equal the plain functions, by Triton's interpreter, on a CPU."""

from __future__ import annotations

import pytest
from kernel_programs_for_tests import BF16_STEP, differences

pytestmark = pytest.mark.processes


@pytest.mark.parametrize(("case", "number"), [("experts", 5), pytest.param("more_experts", 10, marks=pytest.mark.soak)])
def test_products_with_codes_of_chosen_experts_are_those_with_decoded_weights(case: str, number: int) -> None:
    found = differences(case, "expert_kernels_for_tests")
    assert len(found) == number
    assert {name.partition(" torch")[0] for name in found} == {"tiles", "few rows", "token"}
    for name, parts in found.items():
        assert parts.pop("codes of other experts") > 0.03, name
        assert parts.pop("other weights", 1.0) > 0.03, name
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)
    assert any("added" in parts for parts in found.values())
    assert any("rows" in parts for parts in found.values())


def test_routers_and_the_order_of_rows_are_those_of_plain_functions() -> None:
    found = differences("routes", "expert_kernels_for_tests")
    assert len(found) == 3
    for name, parts in found.items():
        assert parts.pop("experts") == parts.pop("order") == 0, name
        assert min(parts.pop("not normed"), parts.pop("order of others")) > 0.03, name  # controls
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)
