"""One training step under any plan: the same function trains, is verified and is benchmarked.

Losses are normalised by the number of valid targets in the whole batch, over all ranks and micro-batches, so that
every layout computes the same loss and the same gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import Traffic, all_reduce
from weft.comm.ledger import Key
from weft.mesh import Mesh
from weft.models.loss import IGNORE
from weft.parallel import clip_grad_norm, sync_gradients
from weft.parallel.context import own_tokens
from weft.parallel.vocabulary import cross_entropy, vocabulary_of
from weft.plan import Plan

Batch = tuple[Tensor, ...]


@dataclass(frozen=True)
class Objective:
    """What is minimised: `total(model, batch)` summed over the batch's targets, of which there are `count(batch)`."""

    count: Callable[[Batch], Tensor]
    total: Callable[[nn.Module, Batch], Tensor]


@dataclass(frozen=True)
class StepResult:
    """The batch's mean loss, the gradient norm before clipping and the valid targets, on the device."""

    loss: Tensor
    grad_norm: Tensor
    num_targets: Tensor


def logits_of(output: Any) -> Tensor:
    """The logits in a model's output: the output itself, its `.logits`, or its first element."""
    if isinstance(output, Tensor):
        return output
    found = getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else logits_of(output[0])


def _token_total(model: nn.Module, batch: Batch) -> Tensor:
    return cross_entropy(logits_of(model(batch[0])), batch[1], vocabulary_of(model))[0]


# Cross-entropy of labels [batch, ...] under logits [batch, ..., classes]; the label -100 does not count.
CROSS_ENTROPY = Objective(count=lambda batch: (batch[1] != IGNORE).sum(), total=_token_total)


def train_step(
    model: nn.Module,
    optimizer: Optimizer,
    micro_batches: Sequence[Batch],
    mesh: Mesh,
    objective: Objective = CROSS_ENTROPY,
    clip: float | None = 1.0,
    before_micro_batch: Callable[[int], None] = lambda index: None,
) -> StepResult:
    """Forward, backward and update over this rank's micro-batches of one step (whole sequences, whatever the plan)."""
    micro_batches = [own_tokens(batch, mesh["context"]) for batch in micro_batches]
    num_targets = torch.stack([objective.count(batch) for batch in micro_batches]).sum().double()
    all_reduce(num_targets, mesh["tokens"]).wait()
    # Gradients become the mean over the ranks of `batch`, so each rank's loss is scaled up by their number.
    scale = mesh["batch"].degree / num_targets.clamp(min=1)
    loss = torch.zeros((), dtype=torch.float64, device=num_targets.device)
    for index, batch in enumerate(micro_batches):
        before_micro_batch(index)
        is_last = index == len(micro_batches) - 1
        sync_gradients(model, is_last or mesh.plan.memory.accumulate == "slice")
        total = objective.total(model, batch)
        (total * scale.to(total.dtype)).backward()
        loss += total.detach()
    all_reduce(loss, mesh["tokens"]).wait()
    grad_norm = clip_grad_norm(model, clip, mesh)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return StepResult(loss / num_targets.clamp(min=1), grad_norm, num_targets)


def step_traffic(plan: Plan) -> dict[Key, Traffic]:
    """What a step says beside the strategies: the count of targets, the loss, and the gradient norm."""
    traffic: dict[Key, Traffic] = {}
    if plan.num_batch_ranks * plan.context.degree > 1:
        traffic["tokens", "all_reduce"] = Traffic(2, 16)
    if plan.shard.degree * plan.tensor.x * plan.tensor.y > 1:
        traffic["state", "all_reduce"] = Traffic(1, 8)
    return traffic
