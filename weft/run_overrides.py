"""Reads the tables of a run file, changed by overrides of the command line (`plan.data=2`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from weft.errors import ConfigError
from weft.plan import Plan
from weft.run_tables import profile_bounds
from weft.schema import convert, parse_override, read_toml

SCALED = "scaled from"  # begins the origin of a key that was scaled to an override of train.steps
# Tables that can be given as a number, and the key that the number sets.
_SHORT_TABLES = {
    f"plan.{name}": fields(hint)[0].name
    for name, hint in get_type_hints(Plan).items()
    if hasattr(hint, "from_shorthand")
}


def read_tables(path: Path, overrides: Sequence[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Returns the tables of a run file with its overrides, and where each key came from."""
    tables = read_toml(path)
    origins = dict.fromkeys(_keys(tables), path.name)
    for text in overrides:
        keys, value = parse_override(text)
        _apply(tables, keys, value, text)
        origins[".".join(keys)] = "override"
        nested = _keys(value, ".".join(keys) + ".") if isinstance(value, Mapping) else ()
        origins.update(dict.fromkeys(nested, "override"))
    if origins.get("train.steps") == "override":
        in_file = read_toml(path).get("train")
        origins |= _scale_schedule(tables.get("train"), in_file, origins)
        origins |= _scale_profile(tables.get("train"), in_file, origins)
    return tables, origins


def _scale_schedule(train: Any, in_file: Any, origins: Mapping[str, str]) -> dict[str, str]:
    """Scale the file's warm-up and decay to fewer steps that an override gives, if both do not fit into them.

    Returns the origins of what was changed. Values that are no numbers are left to the checks of `TrainConfig`.
    """
    keys = [key for key in ("warmup_steps", "decay_steps") if origins.get(f"train.{key}") not in (None, "override")]
    try:
        steps, before = (convert(table["steps"], int, "train.steps") for table in (train, in_file))
        given = {key: convert(train[key], int, f"train.{key}") for key in keys}
        total = sum(convert(train.get(key, 0), int, key) for key in ("warmup_steps", "decay_steps"))
    except (ConfigError, KeyError, TypeError):
        return {}
    if total <= steps or not 0 < steps < before:
        return {}
    changed = {key: value * steps // before for key, value in given.items()}
    train.update({key: max(value, 1) if key == "decay_steps" else value for key, value in changed.items()})
    return {f"train.{key}": f"{SCALED} {value} of {before} steps" for key, value in given.items()}


def _scale_profile(train: Any, in_file: Any, origins: Mapping[str, str]) -> dict[str, str]:
    """Scale the file's steps to record to fewer steps that an override gives, if none of them is left. Returns the
    origin of the key if it was changed.
    """
    try:
        steps, before = (convert(table["steps"], int, "train.steps") for table in (train, in_file))
        bounds = profile_bounds(in_file["profile"])
    except (ConfigError, KeyError, TypeError):
        return {}
    if origins["train.profile"] == "override" or bounds is None or not 0 < steps <= bounds[0] < min(bounds[1], before):
        return {}
    first = bounds[0] * steps // before
    train["profile"] = f"{first}:{max(first + 1, min(bounds[1], before) * steps // before)}"
    return {"train.profile": f"{SCALED} {in_file['profile']} of {before} steps"}


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
