"""Kernels of experts in fewer bits equal the plain functions, by Triton's interpreter, on a CPU."""

from __future__ import annotations

import pytest
from test_triton_kernels import BF16_STEP, differences

pytestmark = pytest.mark.processes


def test_products_with_codes_of_chosen_experts_are_those_with_decoded_weights() -> None:
    found = differences("experts", "expert_kernels_for_tests.py")
    assert len(found) == 5
    for name, parts in found.items():
        assert ("rows" in parts and parts.pop("other weights") > 0.03) == ("int8" in name)
        assert parts.pop("codes of other experts") > 0.03, name
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)


def test_routers_and_the_order_of_rows_are_those_of_plain_functions() -> None:
    found = differences("routes", "expert_kernels_for_tests.py")
    assert len(found) == 3
    for name, parts in found.items():
        assert parts.pop("experts") == parts.pop("order") == 0, name
        assert min(parts.pop("not normed"), parts.pop("order of others")) > 0.03, name  # controls
        for part, difference in parts.items():
            assert difference <= (1e-5 if "float32" in name else BF16_STEP), (name, part)
