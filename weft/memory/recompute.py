"""Memory policy `recompute`: save fewer activations and compute them again in backward. Exact, also with dropout.

`full` saves only each block's inputs and runs its forward twice (Chen et al. 2016). `selective` also saves the results
of matmuls, convolutions and attention, and recomputes only cheap operations: norms, activations, rotary embedding
(after Korthikanti et al. 2022); attention with dropout is recomputed too. It applies to blocks; modules outside of
blocks (the root) save everything.

A recomputed forward communicates again what the block communicated in forward. With `memory.keep_collectives` it does
not: the results of collectives are kept, too (`comm/kept_results.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.comm import Ledger
from weft.comm.kept_results import KeepingForward, NeededResults
from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.memory.offload_activations import offloaded_bytes, returning_bytes
from weft.memory.recompute_context import (
    RunningStatistics,
    others_than_statistics,
    register_state,
    registered_states,
    with_states,
)
from weft.mesh import Mesh
from weft.models.recurrent import RecurrentLayer
from weft.models.router import RouterTokens
from weft.plan import BatchSplit, Plan
from weft.profiling import FULL_SHARES, KEPT_OPERATIONS, Block, Profile
from weft.profiling.peak_bytes import Peaks, peaks
from weft.sharding.layout import COMPUTE_DTYPE, needs_units
from weft.strategy import Cost, Strategy, Transient, Values

NOTHING: Mapping[str, int] = {}


class RecomputePolicy(Strategy):
    """The strategy of `memory.recompute` = none, selective or full."""

    name = "recompute"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.memory.recompute != "none" and not profile.blocks:
            return (
                f"memory.recompute = '{plan.memory.recompute}' works on blocks, and the model has none "
                f"(no nn.ModuleList or nn.Sequential with parameters); use 'none'"
            )
        return _refuse_checkpoints(profile, plan) or _refuse_recurrent(profile, plan)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        policy = plan.memory.recompute
        saved = sum((block.saved_bytes or {}).get(policy, 0) for block in profile.all)
        again = sum(block.flops for block in profile.blocks) if policy == "full" else 0
        sent = offloaded_bytes(profile, plan)
        left = {} if needs_units(plan) else _gradients(profile, plan)  # flat buffers of gradients are counted elsewhere
        found = transient(profile, policy, sent, left) if profile.counted else Transient()
        if profile.blocks and profile.blocks[-1].backward_bytes is not None:
            found = replace(found, backward_bytes=max(found.backward_bytes, _with_gradients(profile, plan, sent)))
        return Cost(saved_bytes=saved, transient=found, flops=(3 * profile.flops + again) * split.accumulation)

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.memory.recompute != "none":
            for name, block in find_blocks(model).items():
                if statistics := RunningStatistics(block):
                    register_state(block, statistics)
                if plan.pipe.degree > 1 and (tokens := RouterTokens(block)):  # by then of a later micro-batch
                    register_state(block, tokens)
                # The forward is wrapped, not the module: hooks stay outside and state_dict keys do not change.
                block.forward = _recomputed(
                    plan.memory.recompute, name, block, mesh.ledger if plan.memory.keep_collectives else None
                )
        return model


def _refuse_checkpoints(profile: Profile, plan: Plan) -> str | None:
    """Returns why the model's own checkpoints around blocks do not fit a plan; None if they do.

    Their recompute repeats the communication inside blocks, and a reentrant one also gathers parameters several times,
    which no prediction counts.
    """
    inside = [axis for axis in ("expert", "x", "y", "context") if plan.degree(axis) > 1]
    gathers = plan.shard.degree > 1 or plan.memory.weights > 0
    for block, kind in profile.checkpoints.items():
        if inside or (gathers and (kind == "reentrant" or plan.memory.recompute != "none")):
            given = [f"{axis} = {plan.degree(axis)}" for axis in inside] or [f"shard = {plan.shard.degree}"]
            other = ", use_reentrant=False" if kind == "reentrant" and not inside else ""
            return (
                f"the model runs block '{block}' in a checkpoint of its own (torch.utils.checkpoint, {kind}), whose "
                f"recompute communicates over {', '.join(given)} and is not predicted; use plan.memory.recompute "
                f"instead{other}, or data"
            )
    return None


def _refuse_recurrent(profile: Profile, plan: Plan) -> str | None:
    """Returns why selective recompute does not fit layers of LSTM and GRU, whose kernels change the results of their
    matmuls in place, or hide them; None if it does.
    """
    if plan.memory.recompute != "selective" or profile.model is None:
        return None
    for name, block in find_blocks(profile.model).items():
        if any(isinstance(module, RecurrentLayer | nn.RNNBase) for module in block.modules()):
            return (
                f"memory.recompute = 'selective' keeps the results of matmuls, and block '{name}' is recurrent: "
                f"torch's LSTM and GRU change or hide theirs; use 'full' or 'none'"
            )
    return None


# Arguments of blocks of transformers: caches of keys and values for generation. In training they are of no use, and a
# block that is computed again would add its keys a second time. transformers' own checkpointing leaves them out, too.
KEY_CACHES = ("past_key_values", "past_key_value", "layer_past")


def _recomputed(policy: str, name: str, block: nn.Module, keeper: Ledger | None) -> Callable[..., Any]:
    """Return a block's forward under a policy. Recompute restores the registered states that it reads.

    With `keeper`, recompute takes the results of collectives that it kept.
    """
    states, needed = registered_states(block), NeededResults()
    forward = _FirstForward(name, block, block.forward) if others_than_statistics(block) else block.forward
    alone = _with_policy(policy, forward)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            kwargs = {name: None if name in KEY_CACHES else value for name, value in kwargs.items()}
        keeps = keeper is not None and torch.is_grad_enabled()
        if not states and not keeps:
            return alone(*args, **kwargs)
        once = KeepingForward(forward, keeper, needed) if keeps else forward
        return _with_policy(policy, with_states(once, states) if states else once)(*args, **kwargs)

    return recomputed


class _FirstForward:
    """A block's forward. The first that trains is refused if it changes a buffer, as recompute would do so again.

    Running statistics of batch norms, which recompute restores, may change.
    """

    def __init__(self, name: str, block: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._block, self._forward, self._is_known = name, block, forward, False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._is_known or not self._block.training or torch.compiler.is_compiling():
            return self._forward(*args, **kwargs)
        before = {key: (buffer, buffer._version) for key, buffer in others_than_statistics(self._block).items()}
        result = self._forward(*args, **kwargs)
        after = others_than_statistics(self._block)
        for key, (buffer, version) in before.items():
            if after.get(key) is not buffer or buffer._version != version:
                raise PlanError(
                    f"memory.recompute runs the forward of block '{self._name}' again in backward, and that forward "
                    f"changes buffer '{self._name}.{key}', which would change twice; change it outside of blocks, or "
                    f"use memory.recompute = 'none'"
                )
        self._is_known = True
        return result


def _with_policy(policy: str, forward: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """Wrap a forward in the checkpoint that a policy needs."""
    if policy == "none":
        return forward
    if policy == "selective":
        logging.getLogger("torch._higher_order_ops.wrap").addFilter(_is_no_reminder)
        keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, forward, use_reentrant=False, **keywords)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in KEPT_OPERATIONS and not _has_dropout(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _has_dropout(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operation that could be saved uses dropout, as attention on a GPU may.

    If its result were saved, recompute would draw no random numbers for it, and all later draws of the block would
    differ from those of forward.
    """
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
            return bool(given)
    return False


def transient(
    profile: Profile, policy: str, sent: Mapping[str, int] = NOTHING, left: Mapping[str, int] = NOTHING
) -> Transient:
    """Return the bytes that a rank holds beyond its saved activations, at the loss and in the backward of a block.

    `sent`: bytes of offloaded blocks, which come back one block ahead. `left`: bytes that the backward of a block
    leaves.
    """
    if profile.source is None:  # without a loss: the activations of one recomputed block
        again = [_saved(block, "none") for block in profile.blocks]
        return Transient(backward_bytes=0 if policy == "none" else max(again, default=0))
    found, whole = _peaks(profile, policy), profile.source.blocks
    saved = _saved(profile.root, policy)
    before = profile.root.saved_by_layer.get(policy, {}).get("", 0)
    most = -max(0, saved - before)  # activations saved after the blocks are freed when the blocks' backward begins
    over, gone, ahead = [0], 0, returning_bytes(profile.blocks, sent)
    for block in reversed(profile.blocks):
        gone += _saved(block, policy) - sent.get(block.name, 0)
        if found.block_bytes.get(block.name):
            extra = found.block_bytes[block.name] - _saved(whole[block.name], "none")
            extra = int(extra * _tile_share(profile, block, whole[block.name]))
            extra = _rank_part_bytes(profile, extra, found.stream_bytes)
            over.append(_saved(block, "none") + extra + ahead[block.name] - gone)
        gone -= left.get(block.name, 0)
    loss = max(root_excess_bytes(profile, policy).values()) if profile.has_loss else 0
    most += max(over)
    if len(profile.blocks) + 1 == len(whole):  # not a pipeline stage, where each end has its own
        most += int(found.tied_bytes * profile.shares.head)
        end = found.end_bytes * profile.shares.head * _tile_share(profile, profile.root, whole[""])
        most = max(most, int(end) - saved - gone)
    return Transient(0, loss, most)


def _gradients(profile: Profile, plan: Plan) -> dict[str, int]:
    """Return the gradient bytes of each block's parameters, if each gradient is a tensor of its own."""
    width = COMPUTE_DTYPE[plan.precision].itemsize
    return {block.name: sum(p.numel for p in block.parameters if p.trainable) * width for block in profile.blocks}


def _with_gradients(profile: Profile, plan: Plan, sent: Mapping[str, int]) -> int:
    """Return the bytes beyond all saved activations when the backward of the last block ends.

    A compiled backward returns the gradients of all parameters at once, when nothing that the block saved is left.
    """
    block, policy = profile.blocks[-1], plan.memory.recompute
    behind = _saved(profile.root, policy) - profile.root.saved_by_layer.get(policy, {}).get("", 0)
    numel = sum(parameter.numel for parameter in block.parameters if parameter.trainable)
    stream = int(_peaks(profile, policy).stream_bytes * profile.shares.stream)
    stream += returning_bytes(profile.blocks, sent)[block.name]
    return numel * COMPUTE_DTYPE[plan.precision].itemsize + stream - _saved(block, policy) - max(0, behind)


def _tile_share(profile: Profile, local: Block, whole: Block) -> float:
    """Returns a rank's share of a block's images, by saved bytes.

    It is 1 if the tensor axes split the block; their shares are counted elsewhere.
    """
    is_shared = profile.shares == FULL_SHARES and _saved(whole, "none") > 0
    return _saved(local, "none") / _saved(whole, "none") if is_shared else 1.0


def root_excess_bytes(profile: Profile, policy: str) -> dict[str, int]:
    """Return the bytes beyond saved activations, at the loss (key '') and in the backward of each unit of the root."""
    assert profile.source is not None
    found, saved = _peaks(profile, policy), _saved(profile.source.blocks[""], policy)
    own = _saved(profile.root, policy)
    return {name: _root_part_bytes(profile, name, size, saved) - own for name, size in found.root_bytes.items()}


def _peaks(profile: Profile, policy: str) -> Peaks:
    return peaks(profile, policy, partial(_with_policy, policy, preserve_rng_state=False))


def _root_part_bytes(profile: Profile, name: str, num_bytes: int, saved_bytes: int) -> int:
    """Returns a rank's part of `num_bytes`, held at the loss or in the backward of a unit of the root.

    The unit is the head, whose classes may be split, or another one on the residual stream. `saved_bytes` of them are
    saved activations.
    """
    layer, shares = profile.layers.get(name), profile.shares
    if name and not (layer is not None and layer.is_linear):
        return int(num_bytes * shares.stream)
    return _saved(profile.root, "none") + int((num_bytes - saved_bytes) * (shares.head if name else shares.loss))


def _saved(block: Block, policy: str) -> int:
    return 0 if block.saved_bytes is None else block.saved_bytes[policy]


def _rank_part_bytes(profile: Profile, num_bytes: int, stream_bytes: int) -> int:
    """Returns a rank's part of the bytes that a block's backward holds beside saved activations.

    They are one gradient of the residual stream, and tensors inside of split regions.
    """
    stream = min(max(0, num_bytes), stream_bytes)
    return int(stream * profile.shares.stream + (num_bytes - stream) * profile.shares.inner)


def _is_no_reminder(record: logging.LogRecord) -> bool:
    """Is a message of torch none about `context_fn`? torch reminds of in-place operations whether there are any."""
    return "context_fn is passed" not in str(record.msg)
