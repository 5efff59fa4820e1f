"""The blocks of the cache on a CPU: as many as the available memory holds, and no more by request."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from serving_for_tests import GREEDY, make_engine, serve_all, tiny_model

from weft.errors import ConfigError
from weft.serve.model.paged_model import PagedModel
from weft.serve.scheduling.request import Request

BLOCK_BYTES = 512  # of 4 tokens: 2 blocks of the model, 2 key heads of 4 dims, keys and values in float32
SIZES = {"max_running": 2, "token_budget": 16}
FreeBytes = Callable[[int], None]


@pytest.fixture
def container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FreeBytes:
    """Gives this process a cgroup with so many free bytes, of which half are page cache."""

    def give(free: int) -> None:
        (tmp_path / "memory.max").write_text(f"{10**6 + free}\n")
        (tmp_path / "memory.current").write_text(f"{10**6 + free // 2}\n")
        (tmp_path / "memory.stat").write_text(f"anon {10**6}\nfile {free // 2}\n")

    monkeypatch.setattr("weft.sharding.host_memory._GROUP", tmp_path)
    return give


def num_blocks(**options: object) -> int:
    return make_engine(tiny_model("llama"), **{**SIZES, "num_blocks": None, **options})._part.layout.num_blocks


def test_the_cache_is_a_share_of_what_a_container_has_left(container: FreeBytes) -> None:
    container(48_000)
    few = num_blocks()
    container(48_000 + 4 * 3 * BLOCK_BYTES)  # a quarter is for the cache
    assert 0 < few < num_blocks() == few + 3 < 16  # of which all requests can use 16


def test_memory_that_holds_cached_files_counts_as_free(monkeypatch: pytest.MonkeyPatch) -> None:
    pages = {"SC_AVPHYS_PAGES": 0, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", pages.__getitem__)
    assert num_blocks() == 16
    monkeypatch.setattr("weft.serve.model.cache_memory.available_host_bytes", lambda: None)  # it is unknown
    with pytest.raises(ConfigError, match="no memory is left for the key-value cache"):
        num_blocks()
    pages["SC_AVPHYS_PAGES"] = 12
    assert 0 < num_blocks() < 16


@pytest.mark.parametrize("name", ["num_blocks", "swap_blocks"])
def test_more_blocks_than_memory_are_refused_with_the_largest_number_that_fits(container: FreeBytes, name: str) -> None:
    rest = {"num_blocks": 4}
    with pytest.raises(ConfigError, match=rf"{name} = {1 << 50} \(--(cache|swap)-blocks\) .* GiB .* are free"):
        num_blocks(**{**rest, name: 1 << 50})
    container(50 * BLOCK_BYTES)
    with pytest.raises(ConfigError, match="give at most") as refused:
        num_blocks(**{**rest, name: 1000})
    most = int(re.findall(r"give at most (\d+)", str(refused.value))[0])
    assert most == (49 if name == "num_blocks" else 45)  # the cache has one more, for padding
    with pytest.raises(ConfigError, match=f"give at most {most}"):
        num_blocks(**{**rest, name: most + 1})
    engine = make_engine(tiny_model("llama"), **{**SIZES, **rest, name: most})
    assert len(serve_all(engine, [Request("x", (1, 2, 3), 4, GREEDY)])["x"]) == 4
    container(BLOCK_BYTES)
    with pytest.raises(ConfigError, match="not even one fits"):
        num_blocks(**{**rest, name: 5})


def test_memory_is_kept_for_the_logits_of_drafts(container: FreeBytes) -> None:
    container(600_000)
    kept = 8 * 16 * 61  # of 16 tokens a step, of 61 words
    without, drafting = (num_blocks(token_budget=16, max_running=64, **more) for more in ({}, {"speculate": "ngram"}))
    assert without - drafting == pytest.approx(kept / BLOCK_BYTES, abs=1)
    assert drafting < without


def test_decodes_in_float32_have_no_kernel() -> None:
    has_kernel = [make_engine(tiny_model("llama").to(dtype))._part.paged for dtype in (torch.float32, torch.bfloat16)]
    assert [isinstance(one, PagedModel) and one.has_decode_kernel for one in has_kernel] == [False, True]
