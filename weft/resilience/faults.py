"""Faults that a rank does to itself because `weft chaos` asks it to: a NaN in a gradient, a flipped bit of a parameter.

They are asked for by a small file in a folder of the tool's own, named by an environment variable. Ranks that have it
look there between steps; a file that is gone was taken. Without the variable there is no such object and no look.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from weft.parallel.model_state import all_flats

VARIABLE = "WEFT_CHAOS"
INSIDE = ("nan", "flip")  # the kinds that a rank does itself
_REQUEST = re.compile(rb"(nan|flip) ([0-9]{1,10})")
_MAX_REQUEST_BYTES = 64
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def request_path(folder: Path, rank: int) -> Path:
    """Where a fault is asked of a rank."""
    return folder / f"rank-{rank:05d}.fault"


def ask(folder: Path, rank: int, kind: str, seed: int) -> None:
    """Ask a rank for a fault at its next step; where exactly follows from the seed."""
    path = request_path(folder, rank)
    path.with_suffix(".tmp").write_text(f"{kind} {seed}")
    path.with_suffix(".tmp").rename(path)


class Faults:
    """One rank's."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = request_path(folder, rank)
        self._poisoned: RemovableHandle | None = None

    @staticmethod
    def of(environ: Mapping[str, str], rank: int) -> Faults | None:
        """None unless this is a run of `weft chaos`."""
        folder = environ.get(VARIABLE)
        return None if folder is None else Faults(Path(folder), rank)

    def strike(self, model: nn.Module) -> None:
        """Before a step: do what is asked for, if anything is. A NaN comes in this step's gradients and in no other."""
        if self._poisoned is not None:
            self._poisoned.remove()
            self._poisoned = None
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            request = _REQUEST.fullmatch(file.read(_MAX_REQUEST_BYTES))
        self._path.unlink()
        if request is None:
            return
        draw = random.Random(int(request[2]))
        if request[1] == b"flip":
            flip_a_bit(model, draw)
        else:
            flats = [flat for flat in all_flats(model) if flat.trainable]
            parameters = [parameter for flat in flats for parameter in flat.whole_parameters]
            self._poisoned = draw.choice(parameters).register_hook(_with_nan)


def _with_nan(gradient: Tensor) -> Tensor:
    spoiled = gradient.clone()
    spoiled.view(-1)[0] = math.nan
    return spoiled


def flip_a_bit(model: nn.Module, draw: random.Random) -> None:
    """Flip a random bit of a random element of a random piece that this rank holds."""
    pieces = [piece for flat in all_flats(model) if flat.trainable for piece in flat.pieces if piece.numel()]
    piece = draw.choice(pieces).detach()
    words = piece.view(-1).view(_WORDS[piece.element_size()])
    place, bit = draw.randrange(len(words)), draw.randrange(8 * piece.element_size())
    words[place] ^= torch.tensor(1, dtype=words.dtype) << bit
