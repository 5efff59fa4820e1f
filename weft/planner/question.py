"""A question to the planner: the batch of sequences or images of a step, the constraints, and the objective.

Constraints are words: `pipe=4`, `tensor.x<=8`, `recompute!=full`, `no recompute`, `no pipe`, `exact only`. A name is a
field of the plan. The name of a table stands for its degree (`shard<=8`). `x`, `y`, `recompute`, `schedule`, `stage`
and `sequence` stand for the fields of these names.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from operator import attrgetter
from typing import Any, Literal, get_args, get_type_hints

from weft.data.config import ImageShape
from weft.errors import ConfigError
from weft.plan import AXES, Plan, Precision
from weft.schema import nearest, whole_number

Objective = Literal["time", "cost", "devices"]
OBJECTIVES: tuple[str, ...] = get_args(Objective)
Value = float | str | bool | tuple[str, ...]
LIST = "list"  # in place of the type of a field that is a list
SHARE_STEP = 0.05  # of the shares of memory that are tried
COMPARISONS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "==": operator.eq,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_TABLES = {name: hint for name, hint in get_type_hints(Plan).items() if is_dataclass(hint)}
_SHORT = {
    "x": "tensor.x",
    "y": "tensor.y",
    "sequence": "tensor.sequence",
    "schedule": "pipe.schedule",
    "chunks": "pipe.chunks",
    "stage": "shard.stage",
    "recompute": "memory.recompute",
    "offload": "memory.offload",
    **{name: f"tile.{name}" for name in ("rows", "columns", "until", "hand_over", "fused")},
    "tensor": "tensor.x",
    **{name: f"{name}.degree" for name, table in _TABLES.items() if hasattr(table, "degree")},
}
# Fields that do not shape a rank's own work. The search chooses all others first, with `memory.recompute`.
OUTER = (
    "data",
    "pipe",
    "shard",
    "memory",
    "matmul",
    "exact",
    "hierarchical",
    "communication",
    "statistics",
    "ranks_per_device",
)
_INNER = [field.name for field in fields(Plan) if field.name not in OUTER]
inner_settings = attrgetter(*_INNER)
# Those of them that shape a rank's part of the model for one sequence. Axes that only split tokens shorten sequences.
TOKEN_FIELDS = {axis.degree.partition(".")[0] for axis in AXES.values() if axis.splits == ("tokens",)}
size_settings = attrgetter(*(name for name in _INNER if name not in {"micro_batch", *TOKEN_FIELDS}))
_PATTERN = re.compile(r"\s*([a-z_][a-z_.]*)\s*(<=|>=|!=|==|=|<|>)\s*([\w.\-]+)\s*")


@dataclass(frozen=True)
class Constraint:
    """One condition on a field of the plan, with the text that it was parsed from."""

    text: str
    name: str
    comparison: str
    value: Value

    def value_in(self, plan: Plan) -> Any:
        """The plan's value of the field."""
        found: Any = plan
        for step in self.name.split("."):
            found = getattr(found, step)
        return found

    def holds(self, plan: Plan) -> bool:
        """Does the plan satisfy the condition? A field without a value is equal to no number."""
        found = self.value_in(plan)
        return self.comparison == "!=" if found is None else self.compare(found)

    @property
    def is_equal(self) -> bool:
        """Does it state the value of the field?"""
        return self.comparison in ("=", "==")

    def compare(self, found: Any) -> bool:
        """Does a value of the field satisfy the condition?"""
        return COMPARISONS[self.comparison](found, self.value)

    @property
    def is_inner(self) -> bool:
        """Does it concern settings that are chosen before pipe, shard and data?"""
        return self.name not in NOT_TRIED and self._is_inner

    @property
    def _is_inner(self) -> bool:
        return self.name == "memory.recompute" or self.name.partition(".")[0] not in OUTER


@dataclass(frozen=True)
class Question:
    """What to plan, on all devices of the model's cluster: images if `shape` is given, else sequences of tokens.

    Without `exact`, plans may change the mathematics (batch norm over each rank's own images). `compiles` says whether
    blocks are compiled; None compiles them on GPUs, except for tiles and models with many different layers.
    """

    batch: int
    sequence: int
    precision: Precision = "bf16"
    constraints: tuple[Constraint, ...] = ()
    shape: ImageShape | None = None
    exact: bool = True
    compiles: bool | None = None

    @property
    def unit(self) -> str:
        """The unit of speeds: tokens or images."""
        return "tokens" if self.shape is None else "images"

    def describe(self) -> str:
        """Describes the batch: `32 sequences of 1,024 tokens`, or `32 images of 2,048 × 2,048 pixels`."""
        several = "s" if self.batch != 1 else ""
        if self.shape is not None:
            return f"{self.batch:,} image{several} of {self.shape.height:,} × {self.shape.width:,} pixels"
        return f"{self.batch:,} sequence{several} of {self.sequence:,} tokens"

    def __post_init__(self) -> None:
        if self.batch < 1 or self.sequence < 1:
            raise ConfigError(f"a batch of {self.batch} sequences of {self.sequence} tokens is empty; both at least 1")


def _fields() -> dict[str, Any]:
    """Returns every field of the plan that a constraint may name, with its type."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(Plan).items():
        inner = _TABLES.get(name)
        found |= {f"{name}.{k}": h for k, h in get_type_hints(inner).items()} if inner else {name: hint}
    return {**found, "tile.degree": int}


# Fields that the search tries several values of. A question that excludes the default of any other field is answered
# with a value of that field that satisfies the question (`asked_fields`).
TRIED = frozenset(
    (
        *(axis.degree for axis in AXES.values()),
        *("pipe.schedule", "pipe.chunks", "shard.stage", "tensor.sequence", "tensor.regather", "context.kind"),
        *("branch.batch", "tile.degree", "tile.until", "tile.hand_over", "tile.fused"),
        *("micro_batch", "memory.recompute", "memory.offload", "precision"),
    )
)
NOT_TRIED = tuple(name for name in _fields() if name not in TRIED)


def asked_fields(constraints: Sequence[Constraint]) -> dict[str, Any]:
    """The values that constraints ask for of fields that the search does not try by itself.

    Each is the stated value, or the value nearest to the default that satisfies all constraints on the field. Raises
    ConfigError if they contradict each other.
    """
    found: dict[str, Any] = {}
    for name in dict.fromkeys(one.name for one in constraints if one.name in NOT_TRIED):
        own = [one for one in constraints if one.name == name]
        if not any(one.is_equal for one in own) and all(one.holds(Plan()) for one in own):
            continue
        values = [value for value in _candidates(own) if all(one.compare(value) for one in own)]
        if not values:
            raise ConfigError(f"constraints {' and '.join(map(repr, (one.text for one in own)))} leave no {name}")
        found[name] = values[0]
    return found


def _candidates(constraints: Sequence[Constraint]) -> list[Any]:
    """Values of the field of these constraints, some of which satisfy each of them alone."""
    kind = _kind_of(constraints[0].text, constraints[0].name)
    if kind is bool:
        return [False, True]
    if isinstance(kind, tuple):
        return [*kind] if kind[0] != LIST else [(), *((one,) for one in kind[1:])]
    step = 1 if kind is int else SHARE_STEP
    stated = [one.value for one in constraints if isinstance(one.value, int | float)]
    return [*stated, *(value + step for value in stated), *(max(0, value - step) for value in stated)]


def with_fields(plan: Plan, values: Mapping[str, Any]) -> Plan:
    """Returns the plan with these values of its fields, by their names. Raises PlanError if they contradict."""
    changes: dict[str, Any] = {}
    for name, value in values.items():
        table, _, key = name.rpartition(".")
        if table:
            changes[table] = replace(changes.get(table, getattr(plan, table)), **{key: value})
        else:
            changes[name] = value
    return replace(plan, **changes)


def parse_constraints(texts: Sequence[str]) -> tuple[Constraint, ...]:
    """Parses constraints. One text may hold several, separated by commas."""
    return tuple(_parse(part.strip()) for text in texts for part in text.split(",") if part.strip())


def _parse(text: str) -> Constraint:
    if text == "exact only":
        return Constraint(text, "exact", "=", True)
    if text.startswith("no "):
        return _none_of(text, text[3:].strip())
    match = _PATTERN.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"constraint '{text}' is not understood; write a field of the plan and a value (pipe=4, tensor.x<=8, "
            f"recompute!=full), 'no recompute', 'no pipe' or 'exact only'"
        )
    name = _SHORT.get(match[1], match[1])
    kind = _kind_of(text, name)
    value = _value(text, match[3], kind)
    if match[2] not in ("=", "==", "!=") and kind not in (int, float):
        raise ConfigError(f"constraint '{text}': {name} is not a number, so only = and != compare it")
    return Constraint(text, name, match[2], value)


def _none_of(text: str, what: str) -> Constraint:
    """Parses `no recompute`, `no pipe` and the like: the field must have its neutral value."""
    name = _SHORT.get(what, what)
    kind = _kind_of(text, name)
    words: dict[str, float | str | bool] = {"memory.recompute": "none", "memory.offload": 0, "tensor.sequence": False}
    none = words.get(name, 1 if kind is int else None)  # type: ignore[arg-type]
    if none is None or name in ("micro_batch", "shard.stage"):
        raise ConfigError(
            f"constraint '{text}' is not understood; axes, recompute, offload and sequence can be left out"
        )
    return Constraint(text, name, "=", none)


def _kind_of(text: str, name: str) -> Any:
    """The type of a field, or a tuple of its possible values; of a list, LIST and its possible members."""
    fields = _fields()
    if name not in fields:
        raise ConfigError(f"constraint '{text}': a plan has no '{name}'{nearest(name, [*fields, *_SHORT])}")
    hint = fields[name]
    options = [kind for kind in get_args(hint) if kind is not type(None)]
    if Ellipsis in options:
        return (LIST, *get_args(options[0]))
    if options and all(isinstance(option, type) for option in options):
        return options[0]  # int | None
    return int if options and all(type(option) is int for option in options) else tuple(options) or hint


def _value(text: str, raw: str, kind: Any) -> Value:
    if isinstance(kind, tuple) and kind[0] == LIST:
        if raw in kind[1:]:
            return (raw,)
        one_of = f"one of {', '.join(kind[1:])}" if kind[1:] else "a value in a plan file (weft plan FILE)"
        raise ConfigError(f"constraint '{text}': the field is a list, so '{raw}' cannot be compared; use {one_of}")
    if kind is bool and raw in ("true", "false"):
        return raw == "true"
    if kind is int and raw.isdigit() and len(raw) < 10:
        return int(raw)
    if kind is float and re.fullmatch(r"\d{1,9}(\.\d{1,9})?", raw):
        return float(raw)
    if kind is str or (isinstance(kind, tuple) and raw in kind):
        return raw
    expects = {bool: "true or false", int: "a whole number", float: "a number"}
    known = expects[kind] if kind in expects else f"one of {', '.join(map(str, kind))}"
    raise ConfigError(f"constraint '{text}': '{raw}' is not {known}")


def parse_count(text: str, what: str) -> int:
    """Parses a whole number above 0, as `schema.whole_number` does. `what` names it in errors."""
    number = whole_number(text)
    if not number:
        raise ConfigError(f"{what} {text} is not a whole number above 0; write e.g. 4194304, 4096K or 4M")
    return number
