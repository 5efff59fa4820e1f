"""The option `--device` of commands that run a model on one process."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from weft.errors import ConfigError
from weft.serve.spec import OPTIONS, option_of

DeviceOption = Annotated[str, typer.Option(help=option_of(OPTIONS["device"]).help)]


def chosen_device(device: str) -> Literal["cpu", "cuda"]:
    """Returns the kind of device that `--device` means on this machine. Raises ConfigError for others. CUDA is not
    initialised.
    """
    if device not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"--device {device} is not one of auto, cpu, cuda")
    if device == "cpu":
        return "cpu"
    from weft.cluster.local_gpus import sees_gpu  # imports torch

    if sees_gpu():  # asked without CUDA, which ranks that are forked later need
        return "cuda"
    if device == "cuda":
        raise ConfigError("--device cuda, but torch sees no GPU; use auto or cpu")
    return "cpu"
