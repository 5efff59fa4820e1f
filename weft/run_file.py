"""The run file: one TOML file with the model, the data, the training options and the plan of a run.

    run = load_run(Path("run.toml"), ["plan.data=2", "train.steps=100"])

It is checked before anything starts. A saved run says of each value where it came from: file, override or default.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from weft.architectures import VISION_CONFIGS, LanguageConfig, ModelConfig, VisionConfig, config_from_table
from weft.architectures.lora import Lora
from weft.cluster.hardware import usual_precision
from weft.data.config import (
    SLIDE_CLASSES,
    Data,
    DataConfig,
    ImagesConfig,
    PreferenceConfig,
    SlidesConfig,
    data_class,
    data_from_table,
)
from weft.errors import ConfigError, WeftError
from weft.plan import BatchSplit, Plan, split_batch
from weft.run_overrides import SCALED, read_tables
from weft.run_tables import CheckpointConfig, LogConfig, NumbersConfig, RestartConfig, Roles, TrainConfig
from weft.schema import (
    build_dataclass,
    dump_toml,
    missing_keys,
    nearest,
    refuse_missing,
    to_table,
)

if TYPE_CHECKING:  # files are read and checked without the libraries that these need
    from weft.data.tokenizer import Tokenizer
    from weft.models.tuning import Tuning
    from weft.saved_run import Source


@dataclass(frozen=True)
class Run:
    """A checked run file.

    `source` has the weights to start from (`model.from`), if the file gives some. `origins` has the source of each key.
    `precision_reason` states why weft chose the plan's precision, if the file does not give one.
    """

    name: Annotated[str, "the run's name, a plain word; by default that of the file"]
    folder: Annotated[Path, "where the run keeps its checkpoints and metrics; by default runs/NAME"]
    model: ModelConfig
    source: Path | None
    data: Data
    train: TrainConfig
    plan: Plan
    cluster: Annotated[str, 'the machine: "local", or a name of the catalog as name:nodesxdevices'] = "local"
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    restart: RestartConfig = field(default_factory=RestartConfig)
    numbers: NumbersConfig = field(default_factory=NumbersConfig)
    log: LogConfig = field(default_factory=LogConfig)
    roles: Roles = field(default_factory=Roles)
    lora: Lora | None = None
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
    def scaled(self) -> list[str]:
        """Sentences about keys that were scaled to an override of train.steps."""
        found = {key: origin for key, origin in self.origins.items() if origin.startswith(SCALED)}
        steps = f"as train.steps = {self.train.steps}"
        return [f"{key} = {getattr(self.train, key[6:])}, {origin}, {steps}" for key, origin in found.items()]

    @property
    def num_ranks(self) -> int:
        """The number of processes of the run: those that train, and those with another role."""
        return self.plan.num_ranks + self.roles.num_ranks

    @property
    def tuning(self) -> Tuning:
        """What of the model is trained."""
        from weft.models.tuning import Tuning

        return Tuning(self.train.freeze, self.lora)

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
            "model": {"from": str(self.source)} if self.source else dict(to_table(self.model)),
            **{key: table for key, table in self._tables().items() if key != "model"},
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
        tables = self._tables()
        source = str(self.source) if self.source is not None else None
        values = {"name": self.name, "folder": str(self.folder), "cluster": self.cluster}
        found = {"tables": {**values, **tables}, "origins": dict(self.origins), "source": source}
        return json.dumps({**found, "precision_reason": self.precision_reason})

    def _tables(self) -> dict[str, Any]:
        given = ((key, getattr(self, key)) for key in _TABLES)
        return {key: to_table(value) for key, value in given if value is not None}


PLANNER = "planner"  # the origin of a key that weft chose
FROZEN_SUFFIX = ".frozen"  # suffix of a file with the text of `Run.to_json`
_TABLES = ("model", "data", "train", "plan", "checkpoint", "restart", "numbers", "log", "roles", "lora")
VALUES = ("name", "folder", "cluster")
TEXT_KINDS = ("text", "chat", "preference")  # kinds of data with a tokenizer


def load_run(path: Path, overrides: Sequence[str] = ()) -> Run:
    """Reads and checks a run file with overrides (`plan.data=2`). A frozen run is read as it was saved."""
    if path.suffix == FROZEN_SUFFIX:
        try:
            return run_from_json(path.read_text(encoding="utf-8"), path.stem)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"{path} does not hold a frozen run ({error}); give the run file") from None
    tables, origins = read_tables(path, overrides)
    return run_from_tables(tables, origins, default_name=path.stem)


def check_run_file(path: Path, overrides: Sequence[str] = ()) -> None:
    """Checks the syntax, the keys and the values of a run file, without torch and in a fraction of a second.

    `load_run` checks the rest: what depends on the machine, on the tokenizer or on a folder of weights.
    """
    if path.suffix != FROZEN_SUFFIX:
        _build_tables(read_tables(path, overrides)[0])


def run_from_json(text: str, name: str = "run") -> Run:
    """Returns the run that `Run.to_json` was called on."""
    content = json.loads(text)
    source = content["source"]
    run = run_from_tables(content["tables"], content["origins"], name)
    return replace(
        run, source=Path(source) if source is not None else None, precision_reason=content["precision_reason"]
    )


class _Built(NamedTuple):
    """The tables of a run file as values, except [model], which depends on the data."""

    data: Data
    train: TrainConfig
    plan: Plan
    checkpoint: CheckpointConfig
    restart: RestartConfig
    numbers: NumbersConfig
    log: LogConfig
    roles: Roles
    lora: Lora | None


def _build_tables(tables: Mapping[str, Any]) -> _Built:
    """Returns the tables as values; raises ConfigError if a key or a value breaks a rule. All missing keys are named
    in one error.
    """
    for key in tables:
        if key not in (*_TABLES, *VALUES):
            raise ConfigError(f"unknown key '{key}'{nearest(key, (*_TABLES, *VALUES))}")
    for key in _TABLES:
        if not isinstance(tables.get(key, {}), Mapping):
            raise ConfigError(f"'{key}' = {tables[key]!r} but it expects a table [{key}]")
    for key in VALUES:
        if not isinstance(tables.get(key, ""), str):
            raise ConfigError(f"'{key}' = {tables[key]!r} but it expects a string")
        if not tables.get(key, "default"):
            raise ConfigError(f"'{key}' is empty; give it a value or leave it out")
    for key in VALUES:
        if not tables.get(key, "default").isprintable():
            raise ConfigError(f"{key} = {tables[key]!r} has line breaks or other characters that cannot be printed")
    if Path(tables.get("name", "run")).name != tables.get("name", "run") or tables.get("name") == "..":
        raise ConfigError(f"name = '{tables['name']}' is a path; give a plain name, and the path as folder = ...")
    data, train, model = tables.get("data", {}), tables.get("train", {}), tables.get("model", {})
    if "from" in model and len(model) > 1:
        others = ", ".join(f"model.{key}" for key in model if key != "from")
        raise ConfigError(f"model.from already says what the model is; remove {others}")
    if "from" in model and data.get("kind", "text") in TEXT_KINDS:
        data = {"tokenizer": "bytes", **data}  # `run_from_tables` looks for the one of the folder
    missing = missing_keys(data_class(data), data, "data") + missing_keys(TrainConfig, train, "train")
    if not {"batch", "batch_tokens"} & set(train):
        missing.append("'train.batch' (sequences or images per step) or 'train.batch_tokens'")
    if "from" not in model:
        config_from_table(model)
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
        build_dataclass(Roles, tables.get("roles", {}), "roles"),
        build_dataclass(Lora, tables["lora"], "lora") if "lora" in tables else None,
    )


def run_from_tables(tables: Mapping[str, Any], origins: Mapping[str, str], default_name: str) -> Run:
    """Returns a run from the tables of its file; raises ConfigError if they break a rule."""
    source = _open_source(tables.get("model", {}))
    if source is not None:
        from weft.saved_run import with_tokenizer

        tables = {**tables, "data": with_tokenizer(tables.get("data", {}), source)}
    built = _build_tables(tables)
    data, cluster, reason = built.data, tables.get("cluster", "local"), ""
    name = tables.get("name", default_name)
    if isinstance(data, DataConfig):
        tokenizer = _tokenizer(data)
        data = replace(data, end_token=tokenizer.end_token)  # saved: the files beside a tokenizer may change
        model: ModelConfig = _language_model(tables["model"], tokenizer, data) if source is None else source.model
        if source is not None:
            _check_sizes(source.model, data, tokenizer, f"the model in {source.folder}")
        built = built._replace(data=data)
    elif source is not None:
        raise ConfigError(f"model.from = '{source.folder}' reads text, and data.kind = '{data.kind}' gives images")
    else:
        model = _vision_model(tables["model"], data)
    if "precision" not in tables.get("plan", {}):
        precision, reason = usual_precision(cluster, on_cpu=built.train.device == "cpu")
        built = built._replace(plan=replace(built.plan, precision=precision))
    if built.lora is not None:
        from weft.models.adapter import with_adapter

        built = built._replace(lora=with_adapter(built.lora, tables["lora"]))
    run = Run(
        name=name,
        folder=Path(tables.get("folder", f"runs/{name}")),
        model=model,
        source=None if source is None else source.folder,
        cluster=cluster,
        origins=origins,
        precision_reason=reason,
        **built._asdict(),
    )
    _ = run.split  # raises if the batch does not divide
    for key in ("z_loss", "goldfish", "layer_drop"):
        if getattr(run.train, key) and not isinstance(data, DataConfig):
            raise ConfigError(f"train.{key} is for text, and data.kind = '{data.kind}'; leave it out")
    if not isinstance(data, DataConfig) and data.mirror and run.plan.tile.columns > 1:
        raise ConfigError(
            f"data.mirror = true needs whole rows of images, and plan.tile.columns = {run.plan.tile.columns} splits "
            f"them; use tile.rows, or leave data.mirror out"
        )
    _refuse_tuning(run)
    _refuse_preferences(run)
    run.numbers.refuse(run.train, run.plan, run.checkpoint)
    if run.plan.pipe.shadow and run.checkpoint.memory_every is not None:
        raise ConfigError(
            f"plan.pipe.shadow = true keeps each stage on two ranks, and checkpoint.memory_every = "
            f"{run.checkpoint.memory_every} copies it once more, for a fixed number of ranks; leave one of them out"
        )
    run.train.refuse(data)
    run.roles.refuse(run.train, run.plan, data)
    return run


def _refuse_tuning(run: Run) -> None:
    """Raise ConfigError if train.freeze or [lora] name nothing of the model, or both are given."""
    if run.lora is not None and run.train.freeze:
        raise ConfigError("[lora] freezes all but its own updates; leave train.freeze out")
    if run.lora is not None or run.train.freeze:
        run.tuning.build_on_meta(run.model)


def _refuse_preferences(run: Run) -> None:
    """Raise ConfigError if options do not go with preferences, whose loss is of whole answers."""
    if not isinstance(run.data, PreferenceConfig):
        return
    for key in ("z_loss", "goldfish"):
        if getattr(run.train, key):
            raise ConfigError(f"train.{key} is for the loss of tokens, and data.kind = 'preference'; leave it out")
    if run.plan.context.degree > 1:
        raise ConfigError(
            f"plan.context = {run.plan.context.degree} cuts sequences into parts, and data.kind = 'preference' "
            f"compares whole answers; use context = 1"
        )


def _open_source(table: Mapping[str, Any]) -> Source | None:
    """Returns the weights to start from, if `[model]` has the key `from`."""
    if "from" not in table:
        return None
    from weft.saved_run import open_source

    try:
        return open_source(Path(str(table["from"])))
    except WeftError as error:
        raise type(error)(f"model.from: {error}") from None


def _vision_model(table: Mapping[str, Any], data: SlidesConfig | ImagesConfig) -> VisionConfig:
    """Returns the config of the table `[model]`; raises ConfigError if it does not suit images."""
    if isinstance(data, SlidesConfig) and table.get("architecture") in VISION_CONFIGS:
        table = {"num_classes": SLIDE_CLASSES, **table}
    if isinstance(data, ImagesConfig) and table.get("architecture") in VISION_CONFIGS and "num_classes" not in table:
        from weft.data.images import count_classes

        found = count_classes(Path(data.source))
        table = table if found is None else {**table, "num_classes": found}
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
    return config


def _language_model(table: Mapping[str, Any], tokenizer: Tokenizer, data: DataConfig) -> LanguageConfig:
    """Returns the config of the table; the vocabulary's default is the tokenizer's."""
    if table.get("architecture") not in VISION_CONFIGS and "vocab_size" not in table:
        table = {"vocab_size": tokenizer.vocab_size, **table}
    config = config_from_table(table)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(
            f"model.architecture = '{config.architecture}' takes images, and data.kind = 'text' gives text; use data "
            f"of kind 'slides' or 'images', or a model of language"
        )
    _check_sizes(config, data, tokenizer, "model.vocab_size")
    return config


def _check_sizes(config: LanguageConfig, data: DataConfig, tokenizer: Tokenizer, given: str) -> None:
    """Raise ConfigError if a model has too few tokens or positions for the data. `given` names the model."""
    if config.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"{given} has a vocabulary of {config.vocab_size} but tokenizer '{data.tokenizer}' has "
            f"{tokenizer.vocab_size} tokens; use a vocabulary of at least that"
        )
    longest = getattr(config, "n_positions", None)  # learned positions are limited; rotary ones are not
    if longest is not None and data.sequence > longest:
        raise ConfigError(f"data.sequence = {data.sequence} exceeds the model's n_positions = {longest}")


def _tokenizer(data: DataConfig) -> Tokenizer:
    from weft.data.tokenizer import load_tokenizer

    adds = data.add_special_tokens
    return load_tokenizer(data.tokenizer, end_token=data.end_token, adds_special_tokens=adds)
