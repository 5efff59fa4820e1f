"""Bytes that tensors of a training step really take, on forked ranks."""

from __future__ import annotations

from collections.abc import Callable

from weft.inspection.live_bytes import LiveTensors
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import build, initialise
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import parallelize
from weft.parallel.model_state import state_tensors
from weft.run_file import Run
from weft.step.batch import Batch
from weft.step.examples import example_inputs
from weft.step.train_step import train_step


def peak_bytes(run: Run, random_batch: Callable[[Run, int], Batch]) -> int:
    """The most that any rank of a run held in its second step, with batches of these seeds."""

    def rank(index: int) -> int:
        mesh = Mesh(run.plan)
        whole = build(run.model)
        initialise(whole, run.train.seed)
        model = parallelize(whole, run.plan, mesh, example=lambda: example_inputs(run))
        optimizer = make_optimizer(model, run.train)
        batches = [random_batch(run, number) for number in range(run.split.accumulation)]
        train_step(model, optimizer, batches, mesh)  # which makes gradients and the optimizer's state
        held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
        with LiveTensors(held) as live:
            train_step(model, optimizer, batches, mesh)
        peak: int = live.peak_bytes
        return peak

    found: list[int] = run_local(rank, run.plan.num_ranks)
    return max(found)
