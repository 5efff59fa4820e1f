"""One row of a published table as a case, and how the numbers of rows are read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from published_models import Model

from weft.cluster.hardware import load
from weft.plan import Pipe, Plan
from weft.profiling.software import Software

Row = Mapping[str, str]


@dataclass(frozen=True)
class Case:
    """One measured step. `group`: cases that differ only in the plan; `memory_gib`: what a rank was seen to hold;
    `compiled_loss`: whether the loss was compiled too; `node_bytes_per_second`: what its nodes' NICs move where the
    cluster's move more; `calibration`: what its matmuls reach of the peak where that is not the device's.
    """

    table: str
    label: str
    model: Model
    cluster: str
    software: Software
    plans: tuple[tuple[Plan, int], ...]  # with their micro-batches
    seconds: float
    group: tuple[object, ...] = ()
    memory_gib: float | None = None
    compiled_loss: bool = False
    node_bytes_per_second: float | None = None
    calibration: float | None = None


def ints(row: Row, *names: str) -> list[int]:
    """Counts, which may be written with commas; "vp", "cp", "ep" and "pp" of none are 1."""
    found = []
    for name in names:
        text = row[name].replace(",", "").strip()
        is_none = name in ("vp", "cp", "ep", "pp") and text.lower() in ("", "-", "na", "n/a")
        found.append(1 if is_none else int(text))
        if found[-1] < 1:
            raise ValueError(f"{name} = {text} is less than 1")
    return found


def rate(text: str) -> float:
    """What was measured, which may be written with commas."""
    found = float(text.replace(",", ""))
    if found <= 0:
        raise ValueError(f"a rate of {text}")
    return found


def parts(whole: int, part: int, name: str) -> int:
    """How many parts of this size the whole has."""
    if whole % part or whole < part:
        raise ValueError(f"{name}: {whole} is no multiple of {part}")
    return whole // part


def make_pipe(degree: int, chunks: int = 1) -> Pipe:
    return Pipe(degree, "interleaved", chunks=chunks) if chunks > 1 else Pipe(degree)


def nodes(name: str, num_devices: int, each: str | None = None) -> str:
    """So many devices as whole nodes, of `each` devices if given."""
    count = math.ceil(num_devices / max(1, int(each) if each else load(name).node.num_devices))
    return f"{name}:{count}x{each}" if each else f"{name}:{count}"
