"""Matmuls at the border of a region: the order in which collectives start, matmuls run and results are waited for.

One process plays rank 0 of two, with collectives that only write down that they start and are waited for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from weft.comm import Axis, Ledger, Pending
from weft.parallel.tensor import overlapped_matmul as region
from weft.parallel.tensor.overlapped_matmul import StreamSplit, into_region, out_of_region

CHUNKS, BATCH, TOKENS, WIDTH = 3, 2, 6, 4  # tokens of one rank


class Noted(Pending):
    """An operation that says when it is waited for; what it gives is made up."""

    def __init__(self, notes: list[str], name: str) -> None:
        self.notes, self.name = notes, name
        notes.append(f"start {name}")

    def wait(self) -> None:
        if f"wait {self.name}" not in self.notes:  # a second wait costs nothing
            self.notes.append(f"wait {self.name}")


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What happens, in its order."""
    found: list[str] = []

    def count(what: str) -> int:
        return sum(note.startswith(f"start {what}") for note in found)

    def gather(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
        whole.view(axis.degree, -1).copy_(part)
        return Noted(found, f"gather {count('gather')}")

    def scatter(part: Tensor, whole: Tensor, axis: Axis) -> Pending:
        part.copy_(whole.view(axis.degree, -1)[0])
        return Noted(found, f"scatter {count('scatter')}")

    def noting(what: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            found.append(what)
            return original(*args)

        return call

    monkeypatch.setattr(region, "all_gather", gather)
    monkeypatch.setattr(region, "reduce_scatter", scatter)
    monkeypatch.setattr(region, "all_reduce", lambda tensor, axis: Noted(found, f"sum over {axis.name}"))
    monkeypatch.setattr(region, "linear", noting("multiply", region.linear))
    monkeypatch.setattr(region, "_weight_gradient", noting("dW", region._weight_gradient))
    return found


def axis(name: str, degree: int) -> Axis:
    return Axis(name, degree, 0, None, Ledger())


def take(notes: list[str]) -> list[str]:
    taken = notes.copy()
    notes.clear()
    return taken


def test_pieces_travel_on_the_way_in_while_others_are_multiplied(notes: list[str]) -> None:
    value = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    weights = [torch.randn(size, WIDTH, requires_grad=True) for size in (3, 5)]
    first, second = into_region(value, weights, False, axis("x", 2), StreamSplit(CHUNKS))
    assert first.shape == (BATCH, 2 * TOKENS, 3)
    assert second.shape == (BATCH, 2 * TOKENS, 5)
    # While a piece is multiplied with all weights, the gathers of later ones are under way.
    starts = [f"start gather {chunk}" for chunk in range(CHUNKS)]
    assert take(notes) == [
        *starts,
        *(note for chunk in range(CHUNKS) for note in (f"wait gather {chunk}", "multiply", "multiply")),
    ]
    (first.sum() + second.sum()).backward()
    # The first product of a chunk is made by `linear`, the second added to it; weights come while dI travels.
    pairs = [note for chunk in range(CHUNKS) for note in ("multiply", f"start scatter {chunk}")]
    assert take(notes) == [*pairs, "dW", "dW", *(f"wait scatter {chunk}" for chunk in range(CHUNKS))]


def test_what_is_gathered_again_travels_while_dI_is_computed(notes: list[str]) -> None:  # noqa: N802
    value = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(3, WIDTH, requires_grad=True)
    (out,) = into_region(value, [weight], False, axis("x", 2), StreamSplit(2, regather=True))
    take(notes)
    out.sum().backward()
    assert take(notes) == [
        *("start gather 0", "start gather 1", "multiply", "start scatter 0", "multiply", "start scatter 1"),
        *("wait gather 0", "wait gather 1", "dW", "wait scatter 0", "wait scatter 1"),
    ]


def test_pieces_travel_on_the_way_out_while_others_are_multiplied(notes: list[str]) -> None:
    value = torch.randn(BATCH, 2 * TOKENS, WIDTH, requires_grad=True)
    weight = torch.randn(3, WIDTH, requires_grad=True)
    out = out_of_region(value, weight, False, axis("x", 2), axis("y", 2), StreamSplit(CHUNKS))
    assert out.shape == (BATCH, TOKENS, 3)
    pairs = [note for chunk in range(CHUNKS) for note in ("multiply", f"start scatter {chunk}")]
    assert take(notes) == [*pairs, *(f"wait scatter {chunk}" for chunk in range(CHUNKS))]
    out.sum().backward()
    arrivals = [note for chunk in range(CHUNKS) for note in (f"wait gather {chunk}", "multiply")]
    starts = [f"start gather {chunk}" for chunk in range(CHUNKS)]
    assert take(notes) == [*starts, *arrivals, "start sum over y", "dW", "wait sum over y"]


def test_a_whole_input_is_summed_while_weights_get_their_gradients(notes: list[str]) -> None:
    value = torch.randn(BATCH, TOKENS, WIDTH, requires_grad=True)
    weights = [torch.randn(WIDTH, size, requires_grad=True) for size in (3, 5)]
    products = into_region(value, weights, True, axis("x", 2))
    assert take(notes) == ["multiply", "multiply"]
    sum(product.sum() for product in products).backward()  # type: ignore[union-attr]
    assert take(notes) == ["multiply", "start sum over x", "dW", "dW", "wait sum over x"]


def test_what_needs_no_gradient_says_nothing(notes: list[str]) -> None:
    x, y, stream = axis("x", 2), axis("y", 2), StreamSplit(2, regather=True)
    weight, frozen = torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH)
    data, value = torch.randn(BATCH, 4, WIDTH), torch.randn(BATCH, 4, WIDTH, requires_grad=True)
    outs = [
        into_region(data, [weight], False, x, stream)[0],
        into_region(value, [frozen], False, x, stream)[0],
        out_of_region(data, weight, False, x, y, stream),
        into_region(value, [frozen, weight], False, x, stream)[0],  # the second's result is not used
    ]
    found = []
    for out in outs:
        take(notes)
        out.sum().backward()
        found.append([note for note in take(notes) if note.startswith("start")])
    gathers, scatters = ["start gather 0", "start gather 1"], ["start scatter 0", "start scatter 1"]
    assert found == [gathers, scatters, gathers, gathers + scatters]


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.booleans())
def test_pieces_are_the_sequence_in_another_order(chunks: int, ranks: int, tokens: int, batch: int, deep: bool) -> None:
    shape = (batch, ranks * chunks * tokens, *([2] if deep else []), 3)
    value = torch.arange(torch.Size(shape).numel()).view(shape)
    pieces = region._pieces(value, chunks, ranks)
    assert pieces.shape[:4] == (chunks, ranks, tokens, batch)
    assert torch.equal(region._join(list(pieces)), value)
    for rank in range(ranks):
        own = value.chunk(ranks, 1)[rank]
        parts = torch.cat([pieces[chunk, rank].movedim(1, 0) for chunk in range(chunks)], 1)
        assert torch.equal(parts, own)
