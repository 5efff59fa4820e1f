"""What autograd holds for backward under each schedule, at the same batch: the most at once, on each rank.

Counted by saved-tensor hooks over one step of the same Llama; parameters aside, a storage once. GEMS' point is here:
by turns, its two replicas hold one micro-batch's activations where GPipe holds all, for twice the parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from side_by_side import make_model
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import SGD

from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, token_loss
from weft.parallel.apply import cost, parallelize
from weft.parallel.model_state import all_flats, named_pieces
from weft.plan import Pipe, Plan, split_batch
from weft.profiling import profile
from weft.step.train_step import train_step

RANKS, MICRO_BATCHES = 4, 8
CONVENTIONS = {
    "saved_bytes": "the most bytes of tensors saved for backward at once, by rank; parameters aside",
    "over_gpipe": "the rank that holds most, over GPipe's",
}


class Held:
    """Bytes of storages that autograd holds now, and the most so far."""

    def __init__(self, ignored: set[int]) -> None:
        self.ignored = ignored
        self.holders: dict[int, int] = {}  # storage -> how many saved tensors look into it
        self.now_bytes = self.peak_bytes = 0

    def pack(self, tensor: Tensor) -> _Saved:
        return _Saved(tensor, self)

    def change(self, tensor: Tensor, by: int) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self.ignored:
            return
        before = self.holders.get(storage._cdata, 0)
        self.holders[storage._cdata] = before + by
        if 0 in (before, before + by):
            self.now_bytes += by * storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.now_bytes)


class _Saved:
    """A saved tensor, until autograd lets go of it."""

    def __init__(self, tensor: Tensor, held: Held) -> None:
        self.tensor, self.held = tensor, held
        held.change(tensor, +1)

    def __del__(self) -> None:
        self.held.change(self.tensor, -1)


def pipes() -> Iterator[Pipe]:
    """GPipe first: the others are compared with it."""
    yield Pipe(RANKS, "gpipe")
    yield Pipe(RANKS, "1f1b")
    yield Pipe(RANKS, "bidirectional")
    yield Pipe(RANKS, "gems", batches=2)
    yield Pipe(RANKS, "gems")


def measure_memory(config: DecoderConfig, sequence: int, pipe: Pipe) -> dict[str, Any]:
    """Measured and predicted, by rank."""
    plan = Plan(pipe=pipe, micro_batch=1)
    tokens = torch.zeros(1, sequence, dtype=torch.int64)
    batches = [(tokens, tokens)] * MICRO_BATCHES

    def rank(index: int) -> int:
        mesh = Mesh(plan)
        model = parallelize(make_model(config), plan, mesh, example=lambda: (tokens,))
        optimizer = SGD([piece for _, piece in named_pieces(model)], lr=0.0)
        train_step(model, optimizer, batches, mesh)
        held = Held({flat.whole.untyped_storage()._cdata for flat in all_flats(model)})
        with saved_tensors_hooks(held.pack, lambda saved: saved.tensor):
            train_step(model, optimizer, batches, mesh)
        assert held.now_bytes == 0, f"{held.now_bytes} bytes are held after the step"
        return held.peak_bytes

    whole = profile(make_model(config), lambda: (tokens,), lambda logits: token_loss(logits, tokens))
    split = split_batch(plan, MICRO_BATCHES, sequence)
    coordinates = [dict.fromkeys(plan.degrees, 0) | {"pipe": index} for index in range(RANKS)]
    return {
        "schedule": pipe.schedule + (f" ({pipe.batches} batches)" if pipe.batches else ""),
        "saved_bytes": {
            "measured": run_local(rank, RANKS, timeout_seconds=300.0),
            "predicted": [cost(whole, plan, split, at).saved_bytes for at in coordinates],
        },
    }


def results(config: DecoderConfig, sequence: int) -> Iterator[tuple[str, Mapping[str, Any], str]]:
    """Each result with its section and a line for people."""
    most_of_gpipe = 0
    for pipe in pipes():
        one = measure_memory(config, sequence, pipe)
        most = max(one["saved_bytes"]["measured"])
        most_of_gpipe = most_of_gpipe or most
        one["over_gpipe"] = most / most_of_gpipe
        held = ", ".join(f"{num_bytes / 2**20:.1f}" for num_bytes in one["saved_bytes"]["measured"])
        yield "memory", one, f"{one['schedule']:24}saved {held} MiB by rank; {one['over_gpipe']:.3f} of gpipe's most"
