"""State that each worker, a rank of `data`, has for itself: its names in a checkpoint, and what other workers load.

1-bit and 0/1 Adam keep errors of compression, and 0/1 Adam weights between exchanges, that differ between workers.
Elements are stored under their parameter's name, so any cut of parameters over ranks can load them:

- As many workers as before: each loads its own.
- Another number: each loads the mean of all. What workers exchange is a mean, so the error that is carried over to the
  next exchange stays the same in total, and so does the mean of the weights between exchanges.
- An error of the server belongs to one element of one worker, and is 0 for the others: the sum of all is loaded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

SERVER_ERROR = "server_error"
_KIND = re.compile(r"(?P<kind>.+)-(?P<worker>[0-9]+)-of-(?P<workers>[0-9]+)")


def worker_kind(kind: str, worker: int, num_workers: int) -> str:
    """Returns the name in a checkpoint of a kind of state of one worker."""
    return f"{kind}-{worker}-of-{num_workers}"


def is_of_worker(kind: str) -> bool:
    """Is this the name of the state of one worker?"""
    return _KIND.fullmatch(kind) is not None


def kinds_to_read(kinds: Iterable[str], worker: int, num_workers: int) -> set[str]:
    """Returns the names of workers' states that one of so many workers needs."""
    found = {kind: match for kind in kinds if (match := _KIND.fullmatch(kind)) is not None}
    return {
        kind
        for kind, match in found.items()
        if match["kind"] == SERVER_ERROR or int(match["workers"]) != num_workers or int(match["worker"]) == worker
    }


def state_for_worker(state: Mapping[str, Tensor], worker: int, num_workers: int) -> dict[str, Tensor]:
    """Returns the state of one of `num_workers` workers, by kind, made of what `kinds_to_read` names."""
    found: dict[str, dict[int, Tensor]] = {}
    for name, values in state.items():
        match = _KIND.fullmatch(name)
        if match is not None and name in kinds_to_read([name], worker, num_workers):
            found.setdefault(match["kind"], {})[int(match["worker"])] = values
    return {kind: _together(kind, [by_worker[one] for one in sorted(by_worker)]) for kind, by_worker in found.items()}


def _together(kind: str, values: list[Tensor]) -> Tensor:
    if len(values) == 1:
        return values[0]
    all_workers = torch.stack(values).double()
    return (all_workers.sum(0) if kind == SERVER_ERROR else all_workers.mean(0)).to(values[0].dtype)
