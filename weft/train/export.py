"""A checkpoint as a Hugging Face folder that transformers loads, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.models import write_weights
from weft.train.generate import open_checkpoint, saved_data, saved_model

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    source: Path, target: Path, dtype: str | None = None, progress: Callable[[int, int], None] | None = None
) -> None:
    """Write the newest checkpoint under `source` to `target`, in the dtype it was trained in or in the one given."""
    checkpoint = open_checkpoint(source)
    entries = checkpoint.entries("parameter")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, entry in enumerate(entries, 1):
            tensor = checkpoint.read(entry.name, "parameter")
            yield entry.name, tensor if dtype is None else tensor.to(DTYPES[dtype])
            if progress is not None:
                progress(done, len(entries))

    write_weights(target, saved_model(checkpoint), tensors())
    tokenizer = Path(saved_data(checkpoint).tokenizer)
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if tokenizer.is_file():
        shutil.copy(tokenizer, target / "tokenizer.json")
