"""Compiled products of one row on a CPU equal those with the decoded weights, for any number of threads; without a C
compiler, torch computes and a warning says so.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from serving_for_tests import GREEDY, serve_all, tiny_model, tokens_of
from test_engine import make_engine

from weft.serve import cpu_products
from weft.serve.cpu_products import bf16_row_product, cpu_decode_attention, fastest_threads, group_row_product
from weft.serve.packed_linear import pack_model
from weft.serve.paged_attention import decode_attention
from weft.serve.request import Request
from weft.serve.weight_formats import Grouped, weight_format

pytestmark = pytest.mark.processes  # the compiler


@pytest.fixture
def _no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    cpu_products._functions.cache_clear()
    monkeypatch.setattr(cpu_products, "COMPILERS", ("weft-has-no-such-compiler",))
    yield
    cpu_products._functions.cache_clear()


@pytest.mark.parametrize(("num_out", "num_in"), [(5, 37), (64, 128), (3, 16), (130, 1000)])
def test_products_of_bf16_are_those_of_float64(num_out: int, num_in: int) -> None:
    weight, row = torch.randn(num_out, num_in).bfloat16(), torch.randn(1, num_in)
    expected = row.double() @ weight.double().T
    found = bf16_row_product(row, weight)
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    rounded = bf16_row_product(row.bfloat16(), weight)
    assert rounded is not None
    assert rounded.dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("kind", "num_in"), [("int8", 256), ("int8", 96), ("int4", 640), ("int4", 96), ("int4-128", 384)]
)
def test_products_of_codes_are_those_of_decoded_weights(kind: str, num_in: int) -> None:
    form = weight_format(kind)
    assert isinstance(form, Grouped)
    codes, ranges = form.encode(torch.randn(21, num_in) + 0.3)
    row = torch.randn(1, num_in)
    expected = row.double() @ form.decode((codes, ranges), torch.float64).T
    found = group_row_product(row, codes, ranges, form.block(num_in))
    assert found is not None
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-4)
    for wrong in ((codes, ranges.roll(1, 0)), (codes >> 4 | (codes & 15) << 4, ranges)):  # the controls
        other = group_row_product(row, *wrong, form.block(num_in))
        assert other is not None
        assert float((other - expected).abs().max()) > 1e-2


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    weight, row, before = torch.randn(77, 320).bfloat16(), torch.randn(1, 320), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2, 5):
            torch.set_num_threads(number)
            found.append(bf16_row_product(row, weight))
    finally:
        torch.set_num_threads(before)
    assert found[0] is not None
    assert all(torch.equal(found[0], other) for other in found[1:])  # type: ignore[arg-type]


@pytest.mark.parametrize("window", [None, 9])
def test_attention_of_one_request_is_the_plain_one(window: int | None) -> None:
    query, tables = torch.randn(1, 6, 32).bfloat16(), torch.tensor([[5, 2, 0, 7]], dtype=torch.int32)
    keys, values = (torch.randn(32, 3, 32).bfloat16() for _ in range(2))
    for length in (1, 4, 14):
        given = (tables, torch.tensor([length], dtype=torch.int32), 4, window)
        found, expected = (
            cpu_decode_attention(query, keys, values, *given),
            decode_attention(query, keys, values, *given),
        )
        assert found is not None
        torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    other = cpu_decode_attention(query, keys.flip(0), values, *given)  # the control: keys of other slots
    assert other is not None
    assert float((other - expected).abs().max()) > 0.05
    assert cpu_decode_attention(query.float(), keys.float(), values.float(), *given) is None


def test_other_products_are_left_to_torch() -> None:
    weight = torch.randn(8, 32).bfloat16()
    assert bf16_row_product(torch.randn(2, 32), weight) is None  # two rows
    assert bf16_row_product(torch.randn(1, 32).double(), weight) is None
    assert bf16_row_product(torch.randn(1, 8), weight.T) is None
    assert bf16_row_product(torch.randn(1, 32), weight.float()) is None


@pytest.mark.usefixtures("_no_compiler")
def test_without_a_compiler_torch_computes_and_a_warning_says_so() -> None:
    with pytest.warns(UserWarning, match="no C compiler"):
        assert bf16_row_product(torch.randn(1, 32), torch.randn(8, 32).bfloat16()) is None
    form = weight_format("int8")
    row, parts = torch.randn(1, 64), form.encode(torch.randn(8, 64))
    assert group_row_product(row, parts[0], parts[1], (8, 64, 1)) is None


@pytest.mark.parametrize("kind", ["int4", "int8"])
def test_an_engine_with_packed_weights_gives_the_tokens_of_the_decoded_ones(kind: str) -> None:
    requests, answers = [Request("one", (3, 1, 4, 1, 5), 12, GREEDY)], []
    for is_packed in (True, False):
        model, form = tiny_model("llama"), weight_format(kind)
        if is_packed:
            pack_model(model, form)
        else:
            for name, parameter in model.named_parameters():
                if "proj" in name and parameter.dim() == 2:
                    parameter.data = form.decode(form.encode(parameter.data), parameter.dtype)
        answers.append(tokens_of(serve_all(make_engine(model, num_blocks=12), requests)))
    assert answers[0] == answers[1]


def test_the_fastest_number_of_threads_is_found() -> None:
    seconds = {1: 1.0, 2: 0.6, 4: 0.59, 8: 0.4, 12: 0.9}
    assert fastest_threads(12, seconds.__getitem__) == 8
    assert fastest_threads(4, seconds.__getitem__) == 2  # four gain too little
    assert fastest_threads(1, seconds.__getitem__) == 1
