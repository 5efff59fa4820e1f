"""The objects that a run trains with, from its first step to its last."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from weft.health.rank_status import Status
from weft.mesh import Mesh
from weft.run_file import Run
from weft.step.cuda_graph import Graph
from weft.step.layer_drop import Gates
from weft.train.batches import TrainingData


@dataclass
class TrainState:
    """A rank's model, optimizer and data, and where it reports progress.

    `step` counts the finished steps. `say` shows a line, on rank 0. `source` is the fingerprint of the weights that the
    run started from; "" if it started from random ones.
    """

    run: Run
    run_id: str
    data: TrainingData
    mesh: Mesh
    model: nn.Module
    optimizer: Optimizer
    status: Status
    say: Callable[[str], None]
    source: str = ""
    graph: Graph | None = None
    gates: Gates | None = None
    step: int = 0
