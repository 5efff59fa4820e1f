"""Progressive layer dropping (Zhang and He 2020): blocks are skipped at random, deep ones more often, and more as
training goes on.

At step t the block l of L (from 1) is kept with probability p = 1 - l/L * (1 - theta(t)), where theta(t) falls from 1
to `theta` as exp(-gamma * t). If it is kept, its change of the residual stream is divided by p, so that the expected
value stays the same. In evaluation all blocks are kept, and nothing is divided. This saves (1 - theta) * (L + 1) / 2L
of a step's FLOPs. It is not exact.

The decision to keep a block depends only on (seed, step, micro-batch, block). So all ranks skip the same blocks, and so
does a resumed run. Recompute does not repeat the decision, because it is made outside of the block. A skipped block
gathers no parameters. Its gradients count as zeros: they are reduced and the optimizer uses them, so moments decay, as
with small gradients.
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
from weft.parallel.model_state import all_flats
from weft.plan import Plan
from weft.run_tables import LayerDrop


class Gates:
    """Decides which blocks of a model are kept in the current micro-batch."""

    def __init__(self, config: LayerDrop, seed: int, num_layers: int) -> None:
        self.config, self.seed, self.num_layers = config, seed, num_layers
        self._now = 0, 0

    def begin(self, step: int, micro_batch: int) -> None:
        """Sets the current micro-batch."""
        self._now = step, micro_batch

    def gate(self, layer: int) -> tuple[bool, float]:
        """Returns whether a block is kept, and the probability of that."""
        step, micro_batch = self._now
        kept = self.config.keep_probability(step, layer, self.num_layers)
        key = f"layer drop:{self.seed}:{step}:{micro_batch}:{layer}"
        drawn = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest()) / 2**56
        return drawn < kept, kept


def refuse_layer_drop(plan: Plan) -> str | None:
    """The reason why a plan does not allow layer dropping; None if it does."""
    if plan.exact:
        return "train.layer_drop skips blocks, which changes the mathematics; set plan.exact = false"
    if plan.pipe.degree > 1:
        return (
            f"train.layer_drop skips blocks, and the stages of pipe = {plan.pipe.degree} run what was traced; "
            f"use pipe = 1"
        )
    if plan.branch.degree > 1:
        given = f"branch = {plan.branch.degree}"
        return f"train.layer_drop skips blocks, and ranks of {given} run what was traced; use branch = 1"
    return None


def drop_layers(model: nn.Module, config: LayerDrop, seed: int, plan: Plan, optimizer: Optimizer) -> Gates:
    """Makes a parallel model skip blocks in training.

    Returns the gates. Call their `begin` before each micro-batch.
    """
    if (reason := refuse_layer_drop(plan)) is not None:
        raise PlanError(reason)
    blocks = find_blocks(model)
    gates = Gates(config, seed, len(blocks))
    for layer, block in enumerate(blocks.values()):
        # nn.Module.__call__ uses this attribute first, before any hook. Hooks would gather the parameters of a skipped
        # block.
        block._compiled_call_impl = partial(_call, block, gates, layer)
    optimizer.register_step_pre_hook(partial(_fill_missing, model))
    return gates


def _call(block: nn.Module, gates: Gates, layer: int, *args: Any, **kwargs: Any) -> Any:
    """Calls or skips a block."""
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


def _fill_missing(model: nn.Module, optimizer: Optimizer, *_: Any) -> None:
    """Sets missing gradients to zero, so that the optimizer does not pass over blocks that every rank skipped."""
    for flat in all_flats(model):
        flat.unused = frozenset()
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
