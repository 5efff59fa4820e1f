"""Converts TOML tables to frozen dataclasses. Errors name the key and the remedy.

Run files, plan files, model tables and the cluster catalog all use it, so weft checks every file in the same way: the
error for an unknown key suggests the nearest one, that for a wrong type names the value, and a missing key is named.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
import types
import typing
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from weft.errors import ConfigError

T = TypeVar("T")
MAX_FILE_BYTES = 16 * 1024 * 1024
LARGEST_FLOAT = 1 << 1023  # larger whole numbers are infinite


def nearest(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: '; did you mean ...?', or the list of known words."""
    options = sorted(known)
    close = difflib.get_close_matches(word, options, n=1, cutoff=0.5)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; known: {', '.join(options)}" if options else ""


def nearest_of_all(word: str, known: Iterable[str]) -> str:
    """Returns the end of a message about an unknown word: the closest known word if there is one, and all of them."""
    all_known = f"; known: {', '.join(sorted(known))}"
    hint = nearest(word, known)
    return hint if hint == all_known else hint + all_known


def read_toml(path: Path) -> dict[str, Any]:
    """Returns the tables of a TOML file; raises ConfigError with the file and the position of an error."""
    try:
        if path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes; this is not a TOML file of weft")
        return parse_toml(path.read_text(encoding="utf-8-sig"), str(path))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; check the path") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8 text: {error}") from None


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """Returns the tables of a TOML text; `where` names the text in messages."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from None


def build_dataclass(cls: type[T], table: Mapping[str, Any], path: str = "") -> T:
    """Returns a dataclass of type `cls` from a table; `path` is the dotted name of the table, for messages.

    A class may define `from_shorthand(value, path)` to accept a value that is not a table (`shard = 4`).
    """
    assert dataclasses.is_dataclass(cls)
    hints = _type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls) if field.init}
    for key in table:
        if key not in fields:
            raise ConfigError(f"unknown key '{_join(path, key)}'{nearest(key, fields)}")
    refuse_missing(missing_keys(cls, table, path))
    return cls(**{name: convert(table[name], hints[name], _join(path, name)) for name in fields if name in table})


def convert_fields(made: Any, path: str) -> None:
    """Convert the fields of a new frozen dataclass as `build_dataclass` converts a table; `path` is its dotted name."""
    for name, hint, plain in _field_types(type(made)):  # type: ignore[arg-type]  # as below
        value = getattr(made, name)
        if type(value) not in plain:
            converted = convert(value, hint, _join(path, name))
            if converted is not value:
                object.__setattr__(made, name, converted)


@lru_cache(maxsize=256)
def _field_types(cls: type[Any]) -> tuple[tuple[str, Any, frozenset[type]], ...]:
    """Returns for each field its name, its type, and the types of values that need no conversion."""
    hints = _type_hints(cls)  # type: ignore[arg-type]
    plain = {
        name: frozenset(one for one in (get_args(hint) or (hint,)) if isinstance(one, type))
        if get_origin(hint) in (None, Union, types.UnionType)
        else frozenset()
        for name, hint in hints.items()
    }
    return tuple((one.name, hints[one.name], plain[one.name]) for one in dataclasses.fields(cls) if one.init)


@lru_cache(maxsize=256)
def _type_hints(cls: type[Any]) -> Mapping[str, Any]:
    """Returns the types of a class' fields. They are annotated as text, and to evaluate it takes long."""
    return types.MappingProxyType(typing.get_type_hints(cls))


def meanings(cls: type[Any]) -> dict[str, str]:
    """Returns what each field of a dataclass means: the text beside its type, as in `Annotated[int, "steps"]`."""
    hints = typing.get_type_hints(cls, include_extras=True)
    stated = {field.name: getattr(hints[field.name], "__metadata__", ()) for field in dataclasses.fields(cls)}
    return {name: texts[0] for name, texts in stated.items() if texts}


def missing_keys(cls: type[Any], table: Mapping[str, Any], path: str = "") -> list[str]:
    """Returns the keys without a default that a table of `cls` lacks, each with the type it expects and its meaning."""
    hints = _type_hints(cls)  # type: ignore[arg-type]  # mypy takes no type[Any] for hashable
    needed = (
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    )
    missing = [name for name in needed if name not in table]
    said = {name: f": {meaning}" for name, meaning in meanings(cls).items()} if missing else {}
    return [f"'{_join(path, name)}' (expects {type_name(hints[name])}{said.get(name, '')})" for name in missing]


def refuse_missing(keys: list[str]) -> None:
    """Raise ConfigError with all keys that are missing, if there are any."""
    if keys:
        raise ConfigError(f"missing key{'s' * (len(keys) > 1)} {', '.join(keys)}")


def convert(value: Any, hint: Any, path: str) -> Any:
    """Returns `value` as the annotated type `hint`; raises ConfigError with path, value and expected type."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        options = [arg for arg in args if arg is not type(None)]
        if value is None and len(options) < len(args):
            return None
        for option in options[:-1]:
            try:
                return convert(value, option, path)
            except ConfigError:
                continue
        return convert(value, options[-1], path)
    if origin is Literal:
        if value in args and type(value) in {type(arg) for arg in args}:
            return value
        raise _wrong(path, value, hint, nearest(str(value), [str(arg) for arg in args]))
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        if isinstance(value, hint):
            return value
        if isinstance(value, Mapping):
            return build_dataclass(hint, value, path)
        shorthand = getattr(hint, "from_shorthand", None)
        if shorthand is None:
            raise _wrong(path, value, hint)
        return shorthand(value, path)
    if origin in (tuple, list):
        if not isinstance(value, (list, tuple)):
            raise _wrong(path, value, hint)
        return tuple(convert(item, args[0], f"{path}[{i}]") for i, item in enumerate(value))
    if origin in (dict, Mapping, types.MappingProxyType) or getattr(origin, "__name__", "") == "Mapping":
        if not isinstance(value, Mapping):
            raise _wrong(path, value, hint)
        return {str(key): convert(item, args[1], _join(path, str(key))) for key, item in value.items()}
    if hint is float and type(value) is int:
        return float(value) if abs(value) <= LARGEST_FLOAT else math.inf if value > 0 else -math.inf
    if hint is int and type(value) is float and value.is_integer():  # 1e3
        return int(value)
    if hint is int and type(value) is str and not value.isdigit() and (number := whole_number(value)) is not None:
        return number  # 4M
    if hint is Any or type(value) is hint:
        return value
    raise _wrong(path, value, hint)


def whole_number(text: str) -> int | None:
    """Parses a whole number, with K, M or G for powers of 1024: `4M` is 4 194 304. None if it is none."""
    match = re.fullmatch(r"([0-9]{1,15})([KMGkmg]?)", text.strip())
    return None if match is None else int(match[1]) << {"": 0, "k": 10, "m": 20, "g": 30}[match[2].lower()]


def at_least(name: str, value: int, smallest: int) -> None:
    """Raise ConfigError if a value is below `smallest`."""
    if value < smallest:
        raise ConfigError(f"{name} = {value}; it must be at least {smallest}")


def at_most(name: str, value: int, largest: int) -> None:
    """Raise ConfigError if a value is above `largest`."""
    if value > largest:
        raise ConfigError(f"{name} = {value}; it must be at most {largest}")


def to_table(value: Any) -> Any:
    """Returns a dataclass as plain tables without None, the inverse of `build_dataclass`."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        pairs = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value) if field.init)
        return {name: to_table(item) for name, item in pairs if item is not None}
    if isinstance(value, Mapping):
        return {key: to_table(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_table(item) for item in value]
    return value


def changed_values(value: Any) -> dict[str, Any]:
    """Returns a dataclass as plain tables, like `to_table`, without the fields that have their defaults."""
    found: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        item = getattr(value, field.name)
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        if field.init and item is not None and item != default:
            found[field.name] = changed_values(item) if dataclasses.is_dataclass(item) else to_table(item)
    return found


def dump_toml(table: Mapping[str, Any]) -> str:
    """Returns plain tables as TOML text. Scalars come first; tables below the first level are inline."""
    lines = [f"{key} = {inline(item)}" for key, item in table.items() if not isinstance(item, Mapping)]
    for key, item in table.items():
        if isinstance(item, Mapping):
            lines += ["", f"[{key}]", *(f"{name} = {inline(inner)}" for name, inner in item.items())]
    return "\n".join(lines).strip() + "\n"


def parse_override(text: str) -> tuple[list[str], Any]:
    """Parses `a.b=c` to (['a', 'b'], value). The value is TOML; a bare word is a string."""
    name, equals, raw = text.partition("=")
    keys = [key.strip() for key in name.split(".")]
    if not equals or not all(keys):
        raise ConfigError(f"override '{text}' is not of the form section.key=value, e.g. train.steps=100")
    try:
        table = tomllib.loads(f"value = {raw}")
    except tomllib.TOMLDecodeError:
        return keys, raw.strip()
    return keys, table["value"] if len(table) == 1 else raw


def type_name(hint: Any) -> str:
    """Returns a description of an annotated type for users, such as "a list of a string"."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(arg) for arg in args if arg is not type(None))
    if origin is Literal:
        return "one of " + ", ".join(repr(arg) for arg in args)
    if origin in (tuple, list):
        return f"a list of {type_name(args[0])}"
    if dataclasses.is_dataclass(hint):
        return "a table"
    plain = {int: "an integer", float: "a number", str: "a string", bool: "true or false"}
    return plain.get(hint, getattr(hint, "__name__", str(hint)))


def _wrong(path: str, value: Any, hint: Any, hint_text: str = "") -> ConfigError:
    kind = type_name(type(value))
    return ConfigError(f"'{path}' = {value!r} ({kind}) but it expects {type_name(hint)}{hint_text}")


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def inline(value: Any) -> str:
    """Returns a value as TOML on one line."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")  # TOML has JSON's escapes
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {inline(item)}" for key, item in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(inline(item) for item in value) + "]"
    return repr(value)
