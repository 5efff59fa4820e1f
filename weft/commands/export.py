"""Writes a checkpoint as a Hugging Face folder that transformers loads, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from weft.checkpoint import Checkpoint
from weft.errors import ConfigError
from weft.models import write_weights
from weft.serve.generate import saved_data, saved_model, saved_tokenizer, with_intact_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENIZER = "tokenizer.json"


def export(
    source: Path,
    target: Path,
    dtype: str | None = None,
    progress: Callable[[int, int], None] | None = None,
    say: Callable[[str], None] = lambda message: None,
) -> None:
    """Write the newest undamaged checkpoint under `source`, with the run's tokenizer, to the folder `target`.

    Parameters get the given dtype, or else stay in that of training. The folder appears when it is complete.
    `progress` is called with the number of tensors written and that of all, `say` with what is left out.
    """
    with_intact_checkpoint(source, partial(_export, target=target, dtype=dtype, progress=progress), say)


def _export(
    checkpoint: Checkpoint, target: Path, dtype: str | None, progress: Callable[[int, int], None] | None
) -> None:
    entries = checkpoint.entries("parameter")
    config = saved_model(checkpoint)  # refuses a model of images, which has no tokenizer
    files = _tokenizer_file(checkpoint)

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, entry in enumerate(entries, 1):
            tensor = checkpoint.read(entry.name, "parameter")
            yield entry.name, tensor if dtype is None else tensor.to(DTYPES[dtype])
            if progress is not None:
                progress(done, len(entries))

    write_weights(target, config, tensors(), files=files)


def _tokenizer_file(checkpoint: Checkpoint) -> dict[str, Path]:
    """Returns the tokenizer's file by its name in a Hugging Face folder; the "bytes" tokenizer has none."""
    spec = saved_tokenizer(checkpoint)
    if spec == "bytes":
        return {}
    path = Path(spec) / TOKENIZER if Path(spec).is_dir() else Path(spec)
    if not path.is_file():
        stated = saved_data(checkpoint).tokenizer
        raise ConfigError(f"the tokenizer '{stated}' of the run is not there ({path.absolute()}); put it there")
    return {TOKENIZER: path}
