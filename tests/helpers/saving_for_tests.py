"""A checkpoint of a model and its optimizer, and what a run sent in a step beside what was predicted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from weft.checkpoint import Checkpoint, Saver
from weft.checkpoint.folder import step_name
from weft.mesh import Mesh
from weft.optim.saved_state import pieces_to_save
from weft.planner.predict import predict, run_cluster
from weft.recording.rank_file import read_recording


def save(folder: Path, model: nn.Module, optimizer: Any, mesh: Mesh, step: int, token: str = "token") -> Checkpoint:
    """Save on all ranks, and return the checkpoint when it is published."""
    saver = Saver(folder, mesh.rank, mesh.plan.num_ranks, token)
    saver.save(step, pieces_to_save(model, optimizer, mesh), {}, asynchronous=False)
    saver.wait(published=True)
    return Checkpoint(folder / step_name(step))


def sent_and_predicted(run: Any, step: int) -> tuple[dict[Any, tuple[int, int]], dict[Any, tuple[int, int]]]:
    """Calls and bytes over `data` by operation: those of a recorded step of rank 0, and those that were predicted."""
    sizes: dict[tuple[str, str], list[int]] = {}
    for call in read_recording(run.folder)[0].calls:
        if call.step == step and call.axis == "data":
            sizes.setdefault((call.axis, call.operation), []).append(call.num_bytes)
    traffic = predict(run, run_cluster(run)).traffic
    predicted = {key: (value.calls, value.num_bytes) for key, value in traffic.items() if key[0] == "data"}
    return {key: (len(one), sum(one)) for key, one in sizes.items()}, predicted
