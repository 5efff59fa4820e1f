"""A checkpoint as a Hugging Face folder that transformers loads, one tensor at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from weft.config import Run, run_from_tables
from weft.models import write_weights
from weft.schema import parse_toml
from weft.train.generate import open_checkpoint

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def export(
    source: Path, target: Path, dtype: str | None = None, progress: Callable[[int, int], None] | None = None
) -> Run:
    """Write the newest checkpoint under `source` to `target`, in the dtype it was trained in or in the one given."""
    checkpoint = open_checkpoint(source)
    run = run_from_tables(parse_toml(str(checkpoint.state["run"]), str(source)), {}, source.name)
    entries = checkpoint.entries("parameter")

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for done, entry in enumerate(entries, 1):
            tensor = checkpoint.read(entry.name, "parameter")
            yield entry.name, tensor if dtype is None else tensor.to(DTYPES[dtype])
            if progress is not None:
                progress(done, len(entries))

    write_weights(target, run.model, tensors())
    tokenizer = Path(run.data.tokenizer)
    tokenizer = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    if tokenizer.is_file():
        shutil.copy(tokenizer, target / "tokenizer.json")
    return run
