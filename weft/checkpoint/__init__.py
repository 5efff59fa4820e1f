"""Checkpoints that do not depend on the layout: saved under one plan, loaded under any other.

A checkpoint is a folder with safetensors files and one manifest. This package handles pieces of named
tensors; `optim/saved_state.py` knows models and optimizers. `region` describes which part of a global tensor a piece
is, `manifest` describes the contents of a checkpoint, `save` writes one and `load` reads one.
"""

from weft.checkpoint.load import Checkpoint, latest, steps
from weft.checkpoint.manifest import TensorEntry
from weft.checkpoint.region import Region, covers, overlap
from weft.checkpoint.save import Piece, Saver

__all__ = ["Checkpoint", "Piece", "Region", "Saver", "TensorEntry", "covers", "latest", "overlap", "steps"]
