"""The reference of run files: every key with its type, its default and its meaning, as the dataclasses state them.

`python -m weft.commands.run_reference` prints docs/run_file.md. `weft train --print-config` prints
`configuration(run)`: every value of a run, and where it came from.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple, Union, get_args, get_origin

from weft.architectures import DecoderConfig, GPT2Config, RecurrentConfig
from weft.architectures.lora import Lora
from weft.architectures.vision import VISION_CONFIGS
from weft.data.config import ChatConfig, DataConfig, ImagesConfig, PreferenceConfig, SlidesConfig
from weft.plan import Plan
from weft.run_file import VALUES, Run
from weft.run_tables import CheckpointConfig, LogConfig, NumbersConfig, RestartConfig, Roles, TrainConfig
from weft.schema import inline, meanings, to_table, type_name

HEAD = """# The run file

One TOML file says what is trained. Any key can be changed on the command line (`weft train run.toml train.steps=100
plan.shard.stage=2`), `weft init run.toml` writes a file to begin with, and `weft train run.toml --print-config` prints
every value with where it came from. Whole numbers may be written `1e3`, or `4M` (K, M and G are powers of 1024). A key
that is misspelled or missing is an error.

Instead of sizes, [model] may have one key, `from`: a folder of weights to start from ([fine-tuning](fine_tuning.md)).

This page is made from the code by `python -m weft.commands.run_reference > docs/run_file.md`.
"""


class Table(NamedTuple):
    """A table of the run file: its name, what it is for, and its dataclass."""

    name: str
    what: str
    cls: type[Any]


TABLES = (
    Table("model", "decoders, with and without experts", DecoderConfig),
    Table("model", "gpt2", GPT2Config),
    Table("model", "lstm and gru", RecurrentConfig),
    *(Table("model", name, cls) for name, cls in VISION_CONFIGS.items()),
    Table("data", "text", DataConfig),
    Table("data", "chat", ChatConfig),
    Table("data", "preference", PreferenceConfig),
    Table("data", "slides", SlidesConfig),
    Table("data", "images", ImagesConfig),
    Table("train", "", TrainConfig),
    Table("lora", "updates of low rank are trained, and nothing else", Lora),
    Table("plan", "without it, weft plans", Plan),
    Table("checkpoint", "", CheckpointConfig),
    Table("restart", "", RestartConfig),
    Table("numbers", "", NumbersConfig),
    Table("log", "beside metrics.jsonl, which is always written", LogConfig),
    Table("roles", "ranks that do not train, beside those of the plan", Roles),
)


class Key(NamedTuple):
    """A key of a table: its dotted name below the table, the words for its type, its default as TOML, its meaning."""

    name: str
    kind: str
    default: str
    meaning: str


def keys(cls: type[Any], prefix: str = "") -> Iterator[Key]:
    """Yields the keys of a dataclass, each table followed by its own keys."""
    hints, meaning_of = typing.get_type_hints(cls), meanings(cls)
    for field in dataclasses.fields(cls):
        if not field.init:
            continue
        hint, nested = hints[field.name], _dataclass_of(hints[field.name])
        kind = "a table" if nested is not None else type_name(hint)
        yield Key(f"{prefix}{field.name}", kind, _default(field, nested), meaning_of.get(field.name, ""))
        if nested is not None:
            yield from keys(nested, f"{prefix}{field.name}.")


def _dataclass_of(hint: Any) -> type[Any] | None:
    options = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    return next((one for one in options if isinstance(one, type) and dataclasses.is_dataclass(one)), None)


def _default(field: dataclasses.Field[Any], nested: type[Any] | None) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "required"
    return "" if nested is not None or field.default is None else f"`{inline(field.default)}`"


def reference() -> str:
    """Returns docs/run_file.md."""
    lines = [HEAD, "| key | type | default | meaning |", "|---|---|---|---|"]
    lines += [f"| `{name}` | a string | | {meanings(Run)[name]} |" for name in VALUES]
    for table in TABLES:
        lines += ["", f"## [{table.name}]{f': {table.what}' if table.what else ''}", ""]
        lines += ["| key | type | default | meaning |", "|---|---|---|---|"]
        for key in keys(table.cls):
            kind = key.kind.replace("|", "\\|")
            lines.append(f"| `{key.name}` | {kind} | {key.default} | {key.meaning} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


def configuration(run: Run) -> str:
    """Returns every value of a run as TOML, with where it came from: the file, an override, a default, or the planner.

    Keys without a value are comments.
    """
    lines = [f"{name} = {inline(str(getattr(run, name)))}  # {_origin(run, name)}" for name in VALUES]
    for name in ("model", "data", "train", "lora", "plan", "checkpoint", "restart", "numbers", "log", "roles"):
        if getattr(run, name) is None:
            continue
        values = {"from": str(run.source)} if name == "model" and run.source else _values(getattr(run, name))
        lines += ["", f"[{name}]"]
        for key, value in values.items():
            if value is None:
                lines.append(f"# {key} is not set")
            else:
                lines.append(f"{key} = {inline(value)}  # {_origin(run, f'{name}.{key}')}")
    return "\n".join(lines) + "\n"


def _values(config: Any) -> dict[str, Any]:
    return {field.name: to_table(getattr(config, field.name)) for field in dataclasses.fields(config) if field.init}


def _origin(run: Run, key: str) -> str:
    if key == "plan.precision" and run.precision_reason:
        return run.precision_reason
    inner = sorted({where for name, where in run.origins.items() if name == key or name.startswith(f"{key}.")})
    return " and ".join(inner) or "default"


if __name__ == "__main__":
    print(reference(), end="")
