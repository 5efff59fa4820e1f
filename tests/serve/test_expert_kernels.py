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
