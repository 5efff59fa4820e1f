"""The option --device is read without initialising CUDA."""

from __future__ import annotations

import os

import pytest

from weft.cluster.local_gpus import Gpu, hide_gpus
from weft.commands.device_option import chosen_device
from weft.errors import ConfigError


def test_device_is_chosen_without_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks that are forked later could not use CUDA if this process had initialised it."""

    def forbidden(*_: object) -> None:
        raise AssertionError("this initialises CUDA")

    monkeypatch.delenv("PYTORCH_NVML_BASED_CUDA_CHECK", raising=False)
    monkeypatch.setattr("torch.cuda.get_device_properties", forbidden)
    monkeypatch.setattr("torch.cuda.is_available", lambda: os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1")
    assert [chosen_device(one) for one in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]
    with hide_gpus([]):
        assert chosen_device("auto") == "cpu"
        with pytest.raises(ConfigError, match="--device cuda, but torch sees no GPU; use auto or cpu"):
            chosen_device("cuda")
    with hide_gpus([Gpu("H200", 1 << 30, (9, 0))]):
        assert chosen_device("auto") == "cuda"
