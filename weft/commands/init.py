"""`weft init`: writes a commented run file to begin with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from weft.architectures import DecoderConfig, GPT2Config
from weft.commands.output import write_result
from weft.data.config import DataConfig
from weft.errors import ConfigError
from weft.run_file import Run, check_run_file
from weft.run_tables import CheckpointConfig, TrainConfig
from weft.schema import inline, meanings, to_table

SMALL: dict[str, Any] = {
    "architecture": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "intermediate_size": 384,
}
SEQUENCE, CATALOG_SEQUENCE = 256, 2048  # tokens of a sequence of the small model, and of one of the catalog
TRAIN = {"steps": 500, "batch": 16, "learning_rate": 1e-3, "warmup_steps": 50, "evaluate_every": 100}


def init(path: Path, model: str | None, source: str, cluster: str) -> None:
    """Write a run file for a model of the catalog (or a small one), a file or folder of text, and a machine."""
    if path.exists():
        raise ConfigError(f"{path} exists; give another name, or remove it")
    if source != "stdlib" and not Path(source).exists():
        raise ConfigError(f"there is no data at {source}; give a file or folder of text, or stdlib")
    table, sequence = (SMALL, SEQUENCE) if model is None else (_catalog_table(model), CATALOG_SEQUENCE)
    sequence = min(sequence, table.get("n_positions", sequence))
    tables: dict[str, tuple[Mapping[str, Any], type[Any]]] = {
        "model": (table, GPT2Config if table["architecture"] == "gpt2" else DecoderConfig),
        "data": ({"source": source, "sequence": sequence, "tokenizer": "bytes"}, DataConfig),
        "train": (TRAIN, TrainConfig),
        "checkpoint": ({"every": 100}, CheckpointConfig),
    }
    lines = ["# All keys are in docs/run_file.md.", f"cluster = {inline(cluster)}  # {meanings(Run)['cluster']}"]
    for name, (values, cls) in tables.items():
        lines += ["", f"[{name}]"]
        lines += [f"{key} = {inline(value)}  # {meanings(cls)[key]}" for key, value in values.items()]
    planned = path.with_stem(f"{path.stem}-planned")
    lines += ["", "# Without [plan], weft plans for the machine. To see and keep a plan:"]
    lines += [f"#   weft plan {path} --write {planned}"]
    write_result(path, "\n".join(lines) + "\n")
    check_run_file(path)


def _catalog_table(name: str) -> Mapping[str, Any]:
    from weft.models import LanguageConfig
    from weft.models.catalog import load_model

    config = load_model(name)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(f"--model {name} is of images; begin with examples/pathology.toml")
    table: Mapping[str, Any] = to_table(config)
    return {key: value for key, value in table.items() if key not in ("qkv_bias", "qk_norm")}  # the architecture's
