"""Flash attention over pages: the call that weft makes of torch's `varlen_attn`, and what happens where it goes wrong.

No GPU that these tests know has FlashAttention 3, so a plain function with the arguments and meaning of `varlen_attn`,
as torch documents them, stands in for it.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.attention.varlen as varlen
from torch import Tensor

from weft.serve.attention import paged_flash_kernel as paged_flash
from weft.serve.attention import plain
from weft.serve.attention.batch import PagedBatch
from weft.serve.attention.plain import prompt_attention

CPU = torch.device("cpu")
HAS_PAGES = "block_table" in inspect.signature(varlen.varlen_attn).parameters


def pages_by_loop(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
) -> Tensor:
    """`varlen_attn` as documented: keys are [pages, page_size, heads, head_dim], masks are aligned to the end."""
    assert cu_seq_k is None
    assert enable_gqa
    assert seqused_k is not None
    assert block_table is not None
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    left, right = window_size
    parts = []
    for row, length in enumerate(seqused_k.tolist()):
        first, last = cu_seq_q[row : row + 2].tolist()
        assert last - first <= max_q
        assert length <= max_k
        heads = [one[block_table[row].long()].flatten(0, 1)[:length] for one in (key, value)]
        k, v = (one.repeat_interleave(query.shape[1] // one.shape[1], 1) for one in heads)
        behind = torch.arange(length) - torch.arange(length - (last - first), length)[:, None]  # key less query
        mask = (behind <= right) & ((behind >= -left) if left >= 0 else torch.tensor(True))
        scores = torch.einsum("qhd,khd->hqk", query[first:last], k) / query.shape[-1] ** 0.5
        parts.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v))
    return torch.cat(parts)


def other_pages(query: Tensor, *rest: Any, block_table: Tensor, **more: Any) -> Tensor:
    return pages_by_loop(query, *rest, block_table=block_table.flip(0), **more)


def refused(*given: Any, block_table: Tensor, **more: Any) -> Tensor:
    raise RuntimeError("this page size is not supported")


@pytest.fixture(autouse=True)
def asked_once() -> Iterator[None]:
    paged_flash.has_paged_flash.cache_clear()
    yield
    paged_flash.has_paged_flash.cache_clear()


def install(monkeypatch: pytest.MonkeyPatch, function: Any) -> list[str]:
    """A machine with FlashAttention 3, whose attention is `function`; returns what is activated."""
    activated: list[str] = []
    found = importlib.machinery.ModuleSpec("flash_attn_interface", None)
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found if name == found.name else real(name))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(varlen, "varlen_attn", function)
    return activated


@pytest.mark.parametrize("window", [None, 1, 5, 100])
def test_pages_are_attended_to_as_by_the_plain_function(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """One request decodes, two have chunks of prompts, of which one is whole; grouped queries."""
    monkeypatch.setattr(varlen, "varlen_attn", pages_by_loop)
    torch.manual_seed(0)
    query, keys, values = torch.randn(11, 4, 8), torch.randn(48, 2, 8), torch.randn(48, 2, 8)
    tables = torch.tensor([[3, 0, 0], [11, 2, 7], [5, 9, 1]], dtype=torch.int32)
    lengths, none = torch.tensor([2, 9, 6], dtype=torch.int32), torch.empty(0)
    batch = PagedBatch(none, none, none, tables, lengths, none, 4, 1, (5, 6), (9, 6))
    given = (query, keys, values, batch, window)
    torch.testing.assert_close(paged_flash.paged_flash_attention(*given), prompt_attention(*given))


@pytest.mark.skipif(not HAS_PAGES, reason="torch's varlen_attn takes no block tables before 2.12")
def test_the_real_function_takes_these_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = inspect.signature(varlen.varlen_attn), list[inspect.BoundArguments]()

    def bound(*given: Any, **more: Any) -> Tensor:
        calls.append(real.bind(*given, **more))
        return pages_by_loop(*given, **more)

    monkeypatch.setattr(varlen, "varlen_attn", bound)
    assert paged_flash.largest_error(CPU, torch.float32, 16) < 1e-5
    assert [call.arguments["window_size"] for call in calls] == [(-1, 0), (8, 0)]


@pytest.mark.skipif(not HAS_PAGES, reason="torch's varlen_attn takes no block tables before 2.12")
def test_without_flash_attention_3_the_real_function_is_not_called() -> None:
    assert not paged_flash.has_paged_flash(CPU, torch.bfloat16, 16)


def test_a_machine_with_flash_attention_3_uses_it(monkeypatch: pytest.MonkeyPatch) -> None:
    activated = install(monkeypatch, pages_by_loop)
    query = torch.empty(1, 1, 16)
    assert plain._flash_for(query) is paged_flash.paged_flash_attention
    assert activated == ["FA3"]


@pytest.mark.parametrize(
    ("function", "words"),
    [(other_pages, "differs by [0-9.]+ from the plain function"), (refused, "fails .this page size is not supported")],
)
def test_flash_attention_that_goes_wrong_is_not_used(
    function: Any, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(monkeypatch, function)
    query = torch.empty(1, 1, 16)
    with pytest.warns(UserWarning, match=words):
        assert plain._flash_for(query) is plain.flash_prompt_attention
    with warnings.catch_warnings(action="error"):  # said once
        assert plain._flash_for(query) is plain.flash_prompt_attention
