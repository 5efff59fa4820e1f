"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from weft.errors import ConfigError
from weft.serve.spec import OPTIONS, option_of

RunFile = Annotated[Path, typer.Argument(help="the run file (TOML)", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="changes to it: section.key=value", show_default=False)]
Source = Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a Hugging Face folder")]
TokenizerOption = Annotated[str | None, typer.Option(help=option_of(OPTIONS["tokenizer"]).help)]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]
DeviceOption = Annotated[str, typer.Option(help=option_of(OPTIONS["device"]).help)]


def chosen_device(device: str) -> Literal["cpu", "cuda"]:
    """Return the kind of device that `--device` means on this machine, without initialising CUDA. Raises ConfigError
    for an unknown word and for a GPU that is not there.
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
