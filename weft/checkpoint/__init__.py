"""Topology-free checkpoints: safetensors shards and one manifest, saved under one layout, loaded under any other.

The room knows pieces of named tensors, not models, optimizers or process groups. `region` says which part of a
global tensor a piece is, `manifest` what a checkpoint holds, `save` publishes one, `load` reads one.
"""

from weft.checkpoint.load import Checkpoint, latest, steps
from weft.checkpoint.manifest import Entry
from weft.checkpoint.region import Region, covers, overlap
from weft.checkpoint.save import Piece, Saver

__all__ = ["Checkpoint", "Entry", "Piece", "Region", "Saver", "covers", "latest", "overlap", "steps"]
