"""Faults that a rank causes in its own state when `weft chaos` requests them: a NaN in a gradient, a flipped bit.

A request is a small file in a folder that an environment variable names. Ranks look for it between steps and delete it
when they have read it. Without the variable, ranks create no `Faults` and look for no file.
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
RANK_KINDS = ("nan", "flip")  # the kinds of faults that a rank causes itself
_REQUEST = re.compile(rb"(nan|flip) ([0-9]{1,10})")
_MAX_REQUEST_BYTES = 64
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def request_path(folder: Path, rank: int) -> Path:
    """The file that requests a fault of a rank."""
    return folder / f"rank-{rank:05d}.fault"


def request_fault(folder: Path, rank: int, kind: str, seed: int) -> None:
    """Request a fault of a rank at its next step. The seed determines the parameter and the bit."""
    path = request_path(folder, rank)
    path.with_suffix(".tmp").write_text(f"{kind} {seed}")
    path.with_suffix(".tmp").rename(path)


class Faults:
    """Causes the faults that are requested of one rank."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._path = request_path(folder, rank)
        self._nan_hook: RemovableHandle | None = None

    @staticmethod
    def of(environ: Mapping[str, str], rank: int) -> Faults | None:
        """The faults of this rank; None unless this is a run of `weft chaos`."""
        folder = environ.get(VARIABLE)
        return None if folder is None else Faults(Path(folder), rank)

    def strike(self, model: nn.Module) -> None:
        """Cause the requested fault, if there is one. Call it before a step. A NaN affects this step's
        gradients only.
        """
        if self._nan_hook is not None:
            self._nan_hook.remove()
            self._nan_hook = None
        if not self._path.exists():
            return
        with open(self._path, "rb") as file:
            request = _REQUEST.fullmatch(file.read(_MAX_REQUEST_BYTES))
        self._path.unlink()
        if request is None:
            return
        rng = random.Random(int(request[2]))
        if request[1] == b"flip":
            flip_a_bit(model, rng)
        else:
            flats = [flat for flat in all_flats(model) if flat.trainable]
            parameters = [parameter for flat in flats for parameter in flat.whole_parameters]
            self._nan_hook = rng.choice(parameters).register_hook(_with_nan)


def _with_nan(gradient: Tensor) -> Tensor:
    spoiled = gradient.clone()
    spoiled.view(-1)[0] = math.nan
    return spoiled


def flip_a_bit(model: nn.Module, rng: random.Random) -> None:
    """Flip a random bit of a random element of a random parameter piece of this rank."""
    pieces = [piece for flat in all_flats(model) if flat.trainable for piece in flat.pieces if piece.numel()]
    piece = rng.choice(pieces).detach()
    words = piece.view(-1).view(_WORDS[piece.element_size()])
    place, bit = rng.randrange(len(words)), rng.randrange(8 * piece.element_size())
    words[place] ^= torch.tensor(1, dtype=words.dtype) << bit
