"""The run file: one TOML file with the model, the data, the training options and the plan of a run.

    run = load_run(Path("run.toml"), ["plan.data=2", "train.steps=100"])

It is checked before anything starts. A saved run says of each value where it came from: file, override or default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_type_hints

from weft.architectures import VISION_CONFIGS, LanguageConfig, ModelConfig, config_from_table
from weft.cluster.hardware import usual_precision
from weft.data.config import SLIDE_CLASSES, Data, DataConfig, SlidesConfig, data_class, data_from_table
from weft.errors import ConfigError
from weft.plan import BatchSplit, Plan, split_batch
from weft.run_tables import CheckpointConfig, LogConfig, NumbersConfig, RestartConfig, TrainConfig
from weft.schema import (
    build_dataclass,
    dump_toml,
    missing_keys,
    nearest,
    parse_override,
    read_toml,
    refuse_missing,
    to_table,
)

if TYPE_CHECKING:  # files are read and checked without the libraries that these need
    from weft.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Run:
    """A checked run file.

    `model_folder` is a Hugging Face folder to start from, if one is given. `origins` has the source of each key.
    `precision_reason` states why weft chose the plan's precision, if the file does not give one.
    """

    name: str
    folder: Path
    model: ModelConfig
    model_folder: Path | None
    data: Data
    train: TrainConfig
    plan: Plan
    cluster: str = "local"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    numbers: NumbersConfig = field(default_factory=NumbersConfig)
    log: LogConfig = field(default_factory=LogConfig)
    origins: Mapping[str, str] = field(default_factory=dict)
    precision_reason: str = field(default="", compare=False)

    @property
    def split(self) -> BatchSplit:
        """How the batch is split over ranks and micro-batches; raises ConfigError if it does not divide."""
        batch, tokens = self.train.batch, self.train.batch_tokens
        if not isinstance(self.data, DataConfig):
            if batch is None:
                raise ConfigError(
                    f"train.batch_tokens = {tokens} counts text, and data.kind = '{self.data.kind}'; "
                    f"give train.batch (images per step)"
                )
            return split_batch(self.plan, batch, 1, "images")
        if batch is None:
            assert tokens is not None
            if tokens % self.data.sequence:
                raise ConfigError(
                    f"train.batch_tokens = {tokens} is not a multiple of data.sequence = {self.data.sequence}"
                )
            batch = tokens // self.data.sequence
        return split_batch(self.plan, batch, self.data.sequence)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer that the data names; only text has one."""
        assert isinstance(self.data, DataConfig)
        return _tokenizer(self.data)

    def to_toml(self) -> str:
        """Returns the run as TOML with all values, also defaults. Comments state where values came from."""
        tables = {
            "name": self.name,
            "folder": str(self.folder),
            "cluster": self.cluster,
            "model": _model_table(self),
            **{key: to_table(getattr(self, key)) for key in _TABLES if key != "model"},
        }
        lines, section = [], ""
        for line in dump_toml(tables).splitlines():
            if line.startswith("["):
                section = line.strip("[]") + "."
            key = section + line.partition(" = ")[0]
            origin = self.origins.get(key)
            lines.append(f"{line}  # {origin}" if origin and " = " in line else line)
        return "\n".join(lines) + "\n"

    def to_json(self) -> str:
        """Returns the run as JSON, from which `run_from_json` makes the same run, even if its files have changed."""
        tables = {key: to_table(getattr(self, key)) for key in _TABLES}
        folder = str(self.model_folder) if self.model_folder is not None else None
        values = {"name": self.name, "folder": str(self.folder), "cluster": self.cluster}
        found = {"tables": {**values, **tables}, "origins": dict(self.origins), "model_folder": folder}
        return json.dumps({**found, "precision_reason": self.precision_reason})


FROZEN_SUFFIX = ".frozen"  # suffix of a file with the text of `Run.to_json`
_TABLES = ("model", "data", "train", "plan", "checkpoint", "restart", "numbers", "log")
_VALUES = ("name", "folder", "cluster")
# Tables that can be given as a number, and the key that the number sets.
_SHORT_TABLES = {
    f"plan.{name}": fields(hint)[0].name
    for name, hint in get_type_hints(Plan).items()
    if hasattr(hint, "from_shorthand")
}


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Reads and checks a run file with overrides (`plan.data=2`). A frozen run is read as it was saved."""
    if path.suffix == FROZEN_SUFFIX:
        return _read_frozen(path)
    tables, origins = _read_tables(path, overrides)
    return run_from_tables(tables, origins, default_name=path.stem)


def check_run_file(path: Path, overrides: Sequence[str] = ()) -> None:
    """Checks the syntax, the keys and the values of a run file, without torch and in a fraction of a second.

    `load_run` checks the rest: what depends on the machine, on the tokenizer or on a folder of weights.
    """
    if path.suffix != FROZEN_SUFFIX:
        _build_tables(_read_tables(path, overrides)[0])


def _read_tables(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tables of a run file with its overrides, and where each key came from."""
    tables = read_toml(path)
    origins = dict.fromkeys(_keys(tables), path.name)
    for text in overrides:
        keys, value = parse_override(text)
        _apply(tables, keys, value, text)
        origins[".".join(keys)] = "override"
        nested = _keys(value, ".".join(keys) + ".") if isinstance(value, Mapping) else ()
        origins.update(dict.fromkeys(nested, "override"))
    return tables, origins


def _read_frozen(path: Path) -> Run:
    try:
        return run_from_json(path.read_text(encoding="utf-8"), path.stem)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} does not hold a frozen run ({error}); give the run file") from None


def run_from_json(text: str, name: str = "run") -> Run:
    """Returns the run that `Run.to_json` was called on."""
    content = json.loads(text)
    folder = content["model_folder"]
    run = run_from_tables(content["tables"], content["origins"], name)
    own = Path(folder) if folder is not None else None
    return replace(run, model_folder=own, precision_reason=content["precision_reason"])


class _Built(NamedTuple):
    """The tables of a run file as values, except [model], which depends on the data."""

    data: Data
    train: TrainConfig
    plan: Plan
    checkpoint: CheckpointConfig
    restart: RestartConfig
    numbers: NumbersConfig
    log: LogConfig


def _build_tables(tables: Mapping[str, Any]) -> _Built:
    """Returns the tables as values; raises ConfigError if a key or a value breaks a rule. All missing keys are named
    in one error.
    """
    for key in tables:
        if key not in (*_TABLES, *_VALUES):
            raise ConfigError(f"unknown key '{key}'{nearest(key, (*_TABLES, *_VALUES))}")
    for key in _TABLES:
        if not isinstance(tables.get(key, {}), Mapping):
            raise ConfigError(f"'{key}' = {tables[key]!r} but it expects a table [{key}]")
    for key in _VALUES:
        if not isinstance(tables.get(key, ""), str):
            raise ConfigError(f"'{key}' = {tables[key]!r} but it expects a string")
        if not tables.get(key, "default"):
            raise ConfigError(f"'{key}' is empty; give it a value or leave it out")
    if Path(tables.get("name", "run")).name != tables.get("name", "run") or tables.get("name") == "..":
        raise ConfigError(f"name = '{tables['name']}' is a path; give a plain name, and the path as folder = ...")
    data, train = tables.get("data", {}), tables.get("train", {})
    missing = missing_keys(data_class(data), data, "data") + missing_keys(TrainConfig, train, "train")
    if not {"batch", "batch_tokens"} & set(train):
        missing.append("'train.batch' (sequences or images per step) or 'train.batch_tokens'")
    if "folder" not in tables.get("model", {}):
        config_from_table(tables.get("model", {}))
    refuse_missing(missing)
    plan = {"precision": "bf16", **tables.get("plan", {})}  # `run_from_tables` asks the machine; bf16 allows the most
    return _Built(
        data_from_table(data),
        build_dataclass(TrainConfig, train, "train"),
        build_dataclass(Plan, plan, "plan"),
        build_dataclass(CheckpointConfig, tables.get("checkpoint", {}), "checkpoint"),
        build_dataclass(RestartConfig, tables.get("restart", {}), "restart"),
        build_dataclass(NumbersConfig, tables.get("numbers", {}), "numbers"),
        build_dataclass(LogConfig, tables.get("log", {}), "log"),
    )


def run_from_tables(tables: Mapping[str, Any], origins: Mapping[str, str], default_name: str) -> Run:
    """Returns a run from the tables of its file; raises ConfigError if they break a rule."""
    built = _build_tables(tables)
    data, cluster, reason = built.data, tables.get("cluster", "local"), ""
    name = tables.get("name", default_name)
    model, folder = _model(tables.get("model", {}), data)
    if "precision" not in tables.get("plan", {}):
        precision, reason = usual_precision(cluster, on_cpu=built.train.device == "cpu")
        built = built._replace(plan=replace(built.plan, precision=precision))
    run = Run(
        name=name,
        folder=Path(tables.get("folder", f"runs/{name}")),
        model=model,
        model_folder=folder,
        cluster=cluster,
        origins=origins,
        precision_reason=reason,
        **built._asdict(),
    )
    _ = run.split  # raises if the batch does not divide
    for key in ("z_loss", "goldfish", "layer_drop"):
        if getattr(run.train, key) and not isinstance(data, DataConfig):
            raise ConfigError(f"train.{key} is for text, and data.kind = '{data.kind}'; leave it out")
    _refuse_numbers(run)
    if run.plan.pipe.shadow and run.checkpoint.memory_every is not None:
        raise ConfigError(
            f"plan.pipe.shadow = true keeps each stage on two ranks, and checkpoint.memory_every = "
            f"{run.checkpoint.memory_every} copies it once more, for a fixed number of ranks; leave one of them out"
        )
    return run


def _refuse_numbers(run: Run) -> None:
    """Raise ConfigError if [numbers] needs options of other tables that are not set."""
    numbers = run.numbers
    if numbers.on_bad in ("repeat", "rollback") and run.checkpoint.every is None:
        raise ConfigError(f"numbers.on_bad = '{numbers.on_bad}' goes back to a checkpoint; give checkpoint.every")
    if numbers.repeat_every is not None and not run.train.deterministic:
        raise ConfigError(
            f"numbers.repeat_every = {numbers.repeat_every} compares bits, which kernels need not repeat; give "
            f"train.deterministic = true"
        )
    if numbers.repeat_every is not None and run.plan.pipe.degree > 1:
        raise ConfigError(
            f"numbers.repeat_every = {numbers.repeat_every} repeats a micro-batch, which plan.pipe = "
            f"{run.plan.pipe.degree} spreads over stages and time; leave it out (compare_every works)"
        )


def _model(table: Mapping[str, Any], data: Data) -> tuple[ModelConfig, Path | None]:
    """Returns the model's config and its folder, if it has one; raises ConfigError if it does not suit the data."""
    if isinstance(data, DataConfig):
        return _language_model(table, data)
    if isinstance(data, SlidesConfig) and table.get("architecture") in VISION_CONFIGS:
        table = {"num_classes": SLIDE_CLASSES, **table}
    config = config_from_table(table)
    if isinstance(config, LanguageConfig):
        raise ConfigError(
            f"model.architecture = '{config.architecture}' reads text, and data.kind = '{data.kind}' gives images; use "
            f"'resnet', 'deep-resnet' or 'amoebanet-d', or data of kind 'text'"
        )
    if config.is_dense:
        raise ConfigError(
            f"model.architecture = '{config.architecture}' gives a class to each pixel, and data.kind = '{data.kind}' "
            f"has one for each image; use 'resnet', 'deep-resnet' or 'amoebanet-d'"
        )
    height, width, _ = data.shape(config.in_channels)
    if height % config.size_multiple or width % config.size_multiple:
        raise ConfigError(
            f"images of {height} × {width} pixels do not suit model.architecture = '{config.architecture}', which "
            f"halves them often; use multiples of {config.size_multiple}"
        )
    if isinstance(data, SlidesConfig) and (config.in_channels != 3 or config.num_classes < SLIDE_CLASSES):
        raise ConfigError(
            f"slides have 3 channels and {SLIDE_CLASSES} classes; given model.in_channels = {config.in_channels} "
            f"and model.num_classes = {config.num_classes}"
        )
    return config, None


def _language_model(table: Mapping[str, Any], data: DataConfig) -> tuple[ModelConfig, Path | None]:
    """Returns the config of a Hugging Face folder, or of the table; the vocabulary's default is the tokenizer's."""
    tokenizer = _tokenizer(data)
    if "folder" in table:
        from weft.models import read_config

        if len(table) > 1:
            others = ", ".join(f"model.{key}" for key in table if key != "folder")
            raise ConfigError(f"model.folder already says what the model is; remove {others}")
        folder = Path(str(table["folder"]))
        config: ModelConfig = read_config(folder)
        given = f"the model in {folder}"
    else:
        folder, given = None, "model.vocab_size"
        if table.get("architecture") not in VISION_CONFIGS:
            table = {"vocab_size": tokenizer.vocab_size, **table}
        config = config_from_table(table)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(
            f"model.architecture = '{config.architecture}' takes images, and data.kind = 'text' gives text; use data "
            f"of kind 'slides' or 'images', or a model of language"
        )
    if config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{given} has a vocabulary of {config.vocab_size} but tokenizer '{data.tokenizer}' has "
            f"{tokenizer.vocab_size} tokens; use a vocabulary of at least that"
        )
    longest = getattr(config, "n_positions", None)  # learned positions are limited; rotary ones are not
    if longest is not None and data.sequence > longest:
        raise ConfigError(f"data.sequence = {data.sequence} exceeds the model's n_positions = {longest}")
    return config, folder


def _tokenizer(data: DataConfig) -> Tokenizer:
    from weft.data.tokenizer import load_tokenizer

    return load_tokenizer(data.tokenizer, end_token=data.end_token)


def _model_table(run: Run) -> dict[str, Any]:
    return {"folder": str(run.model_folder)} if run.model_folder else dict(to_table(run.model))


def _keys(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    keys = []
    for key, value in tables.items():
        keys += [f"{prefix}{key}"]
        if isinstance(value, Mapping):
            keys += _keys(value, f"{prefix}{key}.")
    return keys


def _apply(tables: dict[str, Any], keys: list[str], value: Any, text: str) -> None:
    place = tables
    for depth, key in enumerate(keys[:-1]):
        inner = place.get(key, {})
        if not isinstance(inner, Mapping):
            long_name = _SHORT_TABLES.get(".".join(keys[: depth + 1]))
            if long_name is None:
                raise ConfigError(f"override '{text}': '{'.'.join(keys[: depth + 1])}' = {inner!r} is no table")
            inner = {long_name: inner}
        place[key] = dict(inner)
        place = place[key]
    place[keys[-1]] = value
