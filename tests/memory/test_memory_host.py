"""Memory of the host, as far as a machine without a GPU can tell."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
import torch

from weft.sharding import host_memory as host


def test_a_kernel_that_refuses_huge_pages_gives_small_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def register(address: int, size_bytes: int, flags: int) -> int:
        locked.append(size_bytes)
        return 0

    def refuse(*_: int) -> None:
        raise OSError(errno.EINVAL, "Invalid argument")

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=lambda address: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(host._Pages, "madvise", refuse)
    zeros = host.host_zeros(8, torch.float32, torch.device("cuda"))
    assert zeros.tolist() == [0.0] * 8
    assert locked == [32]
    del zeros  # while the runtime is there
