"""Weft beside torch's own machinery (DDP, FSDP2, DTensor tensor parallelism) on the same CPU ranks, in one run.

Both sides take the same step: the same Llama, tokens and AdamW, a loss normalised by the global count of targets,
gradients clipped by their global norm. `side_by_side.py` says how they are held against each other. Aims, weft over
peer: step time at most 1.05, bytes at most 1.0.

    python benchmarks/peers.py [--steps 60] [--cases "x 2" "data 2"]

The peers' collectives are counted at torch's dispatcher, in a step of its own because counting is slow. CPU seconds are
those of all threads of all ranks: what a step costs whatever else runs on the machine.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import harness
import torch
import torch.distributed as dist
from side_by_side import (
    AIMS,
    CLIP,
    CONVENTIONS,
    LEARNING_RATE,
    Comparison,
    Side,
    environment,
    make_model,
    measure,
    random_batches,
)
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import AdamW
from torch_layouts import CountCalls, Tally, Totals, ddp, fsdp, tensor_parallel, tensor_parallel_fsdp

from weft.mesh import Mesh
from weft.models import Decoder, DecoderConfig, token_loss
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.plan import Plan
from weft.plan import Shard as ShardAxis
from weft.plan import Tensor as TensorAxes
from weft.schema import to_table
from weft.step.batch import Batch
from weft.step.train_step import train_step

CONFIG = DecoderConfig(
    vocab_size=2048, hidden_size=256, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=4
)
BATCH, SEQUENCE = 2, 128  # sequences of each batch rank, tokens
COUNTED = {
    "bytes": "rank 0, one step: the whole tensor of each call (all-reduced, gathered result, input to be scattered)",
    "wire_bytes": "what a ring of p ranks sends for them: 2(p-1)/p of an all-reduce, (p-1)/p of other calls",
}

LAYOUTS = {
    "blocks": "a unit for each block and the root, which stays whole after forward; DDP has buckets of its own",
    "tensor": "q, k, v, gate, up by columns, o, down by rows; embedding and head by vocabulary; logits stay split",
    "sequence": "norms and residuals by sequence on both sides, from the embedding to the head; both keep what enters "
    "a region whole for backward",
    "chunks": "the peer is weft itself without chunks: pieces that travel while others are multiplied pay where they "
    "would be waited for, and not where ranks share the cores that also carry the bytes, as here",
}


# --- what is compared


@dataclass(frozen=True)
class Case:
    """A plan of weft and torch's way to the same layout, or another plan of weft."""

    plan: Plan
    peer: str
    apply: Callable[[Decoder], nn.Module] | Plan
    num_batch_ranks: int
    splits_logits: bool = False

    @property
    def name(self) -> str:
        return self.plan.describe_axes()

    @property
    def comparison(self) -> Comparison:
        return Comparison(self.name, self.peer, self.plan.num_ranks, self._sides, self._batches)

    def _sides(self) -> dict[str, Side]:
        peer = Weft(self.apply) if isinstance(self.apply, Plan) else peer_of(self, self.apply)
        return {"weft": Weft(self.plan), "peer": peer}

    def _batches(self) -> Iterator[Batch]:
        index = dist.get_rank() // (self.plan.num_ranks // self.num_batch_ranks)
        return random_batches(CONFIG.vocab_size, (BATCH, SEQUENCE), index)


def cases() -> Iterator[Case]:
    """Every comparison, at 2 and 4 ranks."""
    for ranks in (2, 4):
        yield Case(Plan(data=ranks), "DDP", ddp, ranks)
    for ranks in (2, 4):
        yield Case(Plan(shard=ShardAxis(ranks, 3)), "FSDP2, reshard", partial(fsdp, reshard=True), ranks)
        yield Case(Plan(shard=ShardAxis(ranks, 2)), "FSDP2, no reshard", partial(fsdp, reshard=False), ranks)
    for ranks, sequence in product((2, 4), (False, True)):
        plan = Plan(tensor=TensorAxes(ranks, sequence=sequence))
        peer = "TP + SP, loss_parallel" if sequence else "TP, loss_parallel"
        yield Case(plan, peer, partial(tensor_parallel, sequence=sequence), 1, True)
    for sequence in (False, True):
        plan = Plan(shard=ShardAxis(2, 3), tensor=TensorAxes(2, sequence=sequence))
        peer = "TP + SP × FSDP2, reshard" if sequence else "TP × FSDP2, reshard"
        yield Case(plan, peer, partial(tensor_parallel_fsdp, x=2, sequence=sequence), 2, True)
    for ranks in (2, 4):
        whole = Plan(tensor=TensorAxes(ranks, sequence=True))
        yield Case(Plan(tensor=replace(whole.tensor, chunks=2)), "weft, 1 chunk", whole, 1)


# --- one step of each side


class Weft:
    def __init__(self, plan: Plan, config: DecoderConfig = CONFIG) -> None:
        self.mesh = Mesh(plan)
        self.model = parallelize(make_model(config), plan, self.mesh)
        pieces = [piece for _, piece in named_pieces(self.model)]
        self.optimizer = AdamW(pieces, lr=LEARNING_RATE, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        result = train_step(self.model, self.optimizer, [batch], self.mesh, clip=CLIP)
        return result.loss.item(), result.grad_norm.item()

    def count(self, batch: Batch) -> Totals:
        self.mesh.ledger.clear()
        self.step(batch)
        tally = Tally()
        for (axis, operation), traffic in self.mesh.ledger:
            tally.add(operation, traffic.calls, traffic.num_bytes, self.mesh[axis].degree)
        return tally.totals


class Peer:
    """The step that one would write by hand around torch's wrappers."""

    def __init__(
        self, model: nn.Module, kinds: list[list[nn.Parameter]], degree: int, splits_logits: bool = False
    ) -> None:
        """`degree` is of ranks with different samples; clipping and fused AdamW take one of `kinds` at a time."""
        self.model, self.kinds, self.degree = model, kinds, degree
        self.loss_context: Callable[[], AbstractContextManager[None]] = loss_parallel if splits_logits else nullcontext
        world = dist.get_world_size()
        inner = world // self.degree
        groups = [dist.new_group(list(range(start, world, inner))) for start in range(inner)]
        self.batch_group = groups[dist.get_rank() % inner]
        self.optimizer = AdamW([{"params": kind} for kind in kinds], lr=LEARNING_RATE, fused=True)

    def step(self, batch: Batch) -> tuple[float, float]:
        num_targets = torch.tensor(float(batch[1].numel()), dtype=torch.float64)
        self._sum(num_targets)
        with self.loss_context():
            total = token_loss(self.model(batch[0]), batch[1])[0]
            (total * (self.degree / num_targets.item())).backward()
        loss = local(total.detach()).double()
        self._sum(loss)
        norm = self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return (loss / num_targets).item(), norm.item()

    def count(self, batch: Batch) -> Totals:
        calls = CountCalls()
        with calls:
            self.step(batch)
        return calls.tally.totals

    def _sum(self, value: Tensor) -> None:
        if self.degree > 1:
            dist.all_reduce(value, group=self.batch_group)

    def _clip(self) -> Tensor:
        gradients = [[p.grad for p in kind if p.grad is not None] for kind in self.kinds]
        norms = [local(nn.utils.get_total_norm(kind, foreach=True)) for kind in gradients]
        norm = torch.stack(norms).square().sum().sqrt()
        for kind in self.kinds:
            nn.utils.clip_grads_with_norm_(kind, CLIP, norm, foreach=True)
        return norm


def peer_of(case: Case, apply: Callable[[Decoder], nn.Module]) -> Peer:
    model = apply(make_model(CONFIG))
    kinds = [*_by_mesh(model.parameters()).values()]  # plain tensors, or DTensors of one mesh
    return Peer(model, kinds, case.num_batch_ranks, case.splits_logits)


def _by_mesh(parameters: Iterable[nn.Parameter]) -> dict[DeviceMesh | None, list[nn.Parameter]]:
    kinds: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return kinds


def local(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def show(one: Mapping[str, Any]) -> str:
    """A line of the table."""
    low, high = one["step_ratio_quartiles"]
    return (
        f"{one['layout']:36}{one['peer']:26}{one['step_ratio']:6.3f}{f'{low:.2f}-{high:.2f}':>11}"
        f"{one['cpu_ratio']:7.3f}{one['bytes_ratio']:7.4f}{one['wire_bytes_ratio']:7.3f}"
    )


def main() -> None:
    parser = harness.options(__doc__, "peers-cpu.json")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--cases", nargs="*", help="only layouts whose names start so; printed, not written")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "aims": AIMS,
        "conventions": CONVENTIONS | COUNTED,
        "layouts": LAYOUTS,
        "model": to_table(CONFIG),
        "batch": {"sequences_per_batch_rank": BATCH, "tokens": SEQUENCE, "precision": "fp32"},
        "steps_measured": arguments.steps,
        **environment(),
    }
    print(f"{'layout':36}{'peer':26}{'step':>6}{'quartiles':>11}{'cpu':>7}{'bytes':>7}{'wire':>7}")
    results = []
    for case in cases():
        if case.name.startswith(tuple(arguments.cases or ("",))):
            results.append(measure(case.comparison, arguments.steps))
            print(show(results[-1]), flush=True)
    if not arguments.cases:
        result |= {"load_average_after": os.getloadavg()[0], "results": results}
        harness.write(arguments.out, result, device="cpu")


if __name__ == "__main__":
    main()
