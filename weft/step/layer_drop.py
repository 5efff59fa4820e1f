"""Progressive layer dropping (Zhang and He 2020): blocks are skipped at random, deep ones more often, and ever more.

At step t the block l of L (from 1) is kept with probability p = 1 - l/L * (1 - theta(t)), where theta(t) falls from 1
to `theta` as exp(-gamma * t). Where it is kept, what it adds to the stream is divided by p, so that what is expected
stays the same; in evaluation all blocks are kept, and nothing is divided. Of a step's FLOPs a part of
(1 - theta) * (L + 1) / 2L is saved. Not exact.

Whether a block is kept is drawn from (seed, step, micro-batch, block) alone: all ranks skip the same ones, a resumed
run too, and recompute does not ask again, because it is decided outside of the block. A skipped block gathers nothing;
its gradients count as zeros, which are reduced and which the optimizer takes: moments decay, as with small gradients.
"""

from __future__ import annotations

import hashlib
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.chain_ends import hidden_states_of
from weft.plan import Plan
from weft.run_tables import LayerDrop


class Gates:
    """Which blocks of a model are kept in the micro-batch at hand."""

    def __init__(self, config: LayerDrop, seed: int, num_layers: int) -> None:
        self.config, self.seed, self.num_layers = config, seed, num_layers
        self._now = 0, 0

    def begin(self, step: int, micro_batch: int) -> None:
        """Draw for another micro-batch."""
        self._now = step, micro_batch

    def gate(self, layer: int) -> tuple[bool, float]:
        """Whether a block is kept, and how probable that was."""
        step, micro_batch = self._now
        kept = self.config.keep_probability(step, layer, self.num_layers)
        key = f"layer drop:{self.seed}:{step}:{micro_batch}:{layer}"
        drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) / 2**56
        return drawn < kept, kept


def refuse_layer_drop(plan: Plan) -> str | None:
    """Why a plan does not go with skipped blocks."""
    if plan.exact:
        return "train.layer_drop skips blocks, which changes the mathematics; set plan.exact = false"
    if plan.pipe.degree > 1:
        return (
            f"train.layer_drop skips blocks, and the stages of pipe = {plan.pipe.degree} run what was traced; "
            f"use pipe = 1"
        )
    return None


def drop_layers(model: nn.Module, config: LayerDrop, seed: int, plan: Plan, optimizer: Optimizer) -> Gates:
    """Let a parallel model skip blocks when it trains; what is returned is told each micro-batch."""
    if (reason := refuse_layer_drop(plan)) is not None:
        raise PlanError(reason)
    blocks = find_blocks(model)
    gates = Gates(config, seed, len(blocks))
    for layer, block in enumerate(blocks.values()):
        # The place that torch itself looks at first: before hooks, which would gather the block's parameters.
        block._compiled_call_impl = partial(_call, block, gates, layer)
    optimizer.register_step_pre_hook(_fill_missing)
    return gates


def _call(block: nn.Module, gates: Gates, layer: int, *args: Any, **kwargs: Any) -> Any:
    if not block.training:
        return block._call_impl(*args, **kwargs)
    is_kept, probability = gates.gate(layer)
    hidden = hidden_states_of(args, kwargs)
    if hidden is None:
        raise PlanError("train.layer_drop needs blocks whose first argument is the stream of hidden states")
    if not is_kept:
        return hidden
    out = block._call_impl(*args, **kwargs)
    if not isinstance(out, Tensor) or out.shape != hidden.shape:
        raise PlanError("train.layer_drop needs blocks that return the stream of hidden states and nothing else")
    return out if probability == 1 else torch.lerp(hidden, out, 1 / probability)


def _fill_missing(optimizer: Optimizer, *_: Any) -> None:
    """A block that was skipped has no gradient where parameters are held plainly: as elsewhere, it counts as zero."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
