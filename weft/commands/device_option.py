"""The option `--device` of commands that run a model on one process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from weft.errors import ConfigError

DeviceOption = Annotated[str, typer.Option(help="auto (a GPU where there is one), cpu or cuda")]


def chosen_device(device: str) -> Literal["cpu", "cuda"]:
    """Returns the kind of device that `--device` means on this machine. Raises ConfigError for others."""
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is not one of auto, cpu, cuda")
    from weft.cluster.local_gpus import gpus  # imports torch

    if device == "cuda" and not gpus():
        raise ConfigError("--device cuda, but torch sees no GPU; use auto or cpu")
    return "cuda" if device != "cpu" and gpus() else "cpu"
