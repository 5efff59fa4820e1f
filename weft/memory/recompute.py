"""Memory policy `recompute`: keep fewer activations and compute them again in backward. Exact, dropout included.

`full` keeps each block's inputs only and runs its forward twice (Chen et al. 2016). `selective` also keeps the results
of matmuls, convolutions and attention, and recomputes only what is cheap: norms, activations, rotary embedding
(after Korthikanti et al. 2022); attention that drops weights is computed again too. Applied to blocks; the root keeps
all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from weft.inspection.blocks import find_blocks
from weft.memory.activation_choice import ahead_bytes, sent_bytes
from weft.memory.recompute_context import carried_by, carrying
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profile import FULL_SHARES, KEPT_OPERATIONS, Block, Profile
from weft.profile.peak_bytes import Peaks, peaks
from weft.sharding.layout import COMPUTE_DTYPE, needs_units
from weft.strategy import Cost, Strategy, Transient, Values

NOTHING: Mapping[str, int] = {}


class RecomputePolicy(Strategy):
    """`memory.recompute` = none, selective or full."""

    name = "recompute"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.memory.recompute != "none" and not profile.blocks:
            return (
                f"memory.recompute = '{plan.memory.recompute}' works on blocks, and the model has none "
                f"(no nn.ModuleList or nn.Sequential with parameters); use 'none'"
            )
        return None

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        policy = plan.memory.recompute
        saved = sum((block.saved_bytes or {}).get(policy, 0) for block in profile.all)
        again = sum(block.flops for block in profile.blocks) if policy == "full" else 0
        sent = sent_bytes(profile, plan)
        left = {} if needs_units(plan) else _gradients(profile, plan)  # which lie in buffers that are there anyway
        found = transient(profile, policy, sent, left) if profile.counted else Transient()
        if profile.blocks and profile.blocks[-1].backward_bytes is not None:
            found = replace(found, backward_bytes=max(found.backward_bytes, _with_gradients(profile, plan, sent)))
        return Cost(saved_bytes=saved, transient=found, flops=(3 * profile.flops + again) * split.accumulation)

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        if plan.memory.recompute != "none":
            for block in find_blocks(model).values():
                # The forward is wrapped, not the module: hooks stay outside and state_dict keys stay as they are.
                block.forward = _recomputed(plan.memory.recompute, block)
        return model


def _recomputed(policy: str, block: nn.Module) -> Callable[..., Any]:
    """A block's forward under a policy, with all the state that it reads (`carried.py`)."""
    forward, states = block.forward, carried_by(block)
    alone = _under(policy, forward)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not states:
            return alone(*args, **kwargs)
        return _under(policy, carrying(forward, states))(*args, **kwargs)

    return recomputed


def _under(policy: str, forward: Callable[..., Any], **keywords: Any) -> Callable[..., Any]:
    """A block's forward under a policy."""
    if policy == "none":
        return forward
    if policy == "selective":
        keywords["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    return partial(checkpoint, forward, use_reentrant=False, **keywords)


def _policy(_: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = operation in KEPT_OPERATIONS and not _drops(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _drops(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an operation that could be kept drops values, as attention on a GPU may. Kept, it would draw nothing in
    recompute, and all that the block draws behind it would be other numbers than in forward.
    """
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == "dropout_p":
            given = kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value)
            return bool(given)
    return False


def transient(
    profile: Profile, policy: str, sent: Mapping[str, int] = NOTHING, left: Mapping[str, int] = NOTHING
) -> Transient:
    """What a rank holds over what it has saved, at the loss and in the backward of a block. `sent` bytes of blocks have
    gone, and come back a block ahead; `left` bytes are what the backward of a block leaves behind.
    """
    if profile.source is None:  # without a loss: the activations of a block that is computed again
        again = [_saved(block, "none") for block in profile.blocks]
        return Transient(backward_bytes=0 if policy == "none" else max(again, default=0))
    found, whole = _peaks(profile, policy), profile.source.blocks
    saved = _saved(profile.root, policy)
    before = profile.root.saved_by_layer.get(policy, {}).get("", 0)
    most = -max(0, saved - before)  # what was saved behind the blocks is gone when their backward begins
    over, gone, ahead = [0], 0, ahead_bytes(profile.blocks, sent)
    for block in reversed(profile.blocks):
        gone += _saved(block, policy) - sent.get(block.name, 0)
        if found.block_bytes.get(block.name):
            extra = found.block_bytes[block.name] - _saved(whole[block.name], "none")
            extra = int(extra * _tile_share(profile, block, whole[block.name]))
            extra = _part(profile, extra, found.stream_bytes)
            over.append(_saved(block, "none") + extra + ahead[block.name] - gone)
        gone -= left.get(block.name, 0)
    loss = max(over_root(profile, policy).values()) if profile.has_loss else 0
    most += max(over)
    if len(profile.blocks) + 1 == len(whole):  # not a stage, where each end has its own
        most += int(found.tied_bytes * profile.shares.head)
        end = found.end_bytes * profile.shares.head * _tile_share(profile, profile.root, whole[""])
        most = max(most, int(end) - saved - gone)
    return Transient(0, loss, most)


def _gradients(profile: Profile, plan: Plan) -> dict[str, int]:
    """Of each block's parameters, where each is a tensor of its own."""
    width = COMPUTE_DTYPE[plan.precision].itemsize
    return {block.name: sum(p.numel for p in block.parameters if p.trainable) * width for block in profile.blocks}


def _with_gradients(profile: Profile, plan: Plan, sent: Mapping[str, int]) -> int:
    """What there is over all that is saved when the backward of the last block ends: compiled, it gives the gradients
    of all parameters at once, and nothing that the block has saved is left.
    """
    block, policy = profile.blocks[-1], plan.memory.recompute
    behind = _saved(profile.root, policy) - profile.root.saved_by_layer.get(policy, {}).get("", 0)
    numel = sum(parameter.numel for parameter in block.parameters if parameter.trainable)
    stream = int(_peaks(profile, policy).stream_bytes * profile.shares.stream)
    stream += ahead_bytes(profile.blocks, sent)[block.name]
    return numel * COMPUTE_DTYPE[plan.precision].itemsize + stream - _saved(block, policy) - max(0, behind)


def _tile_share(profile: Profile, local: Block, whole: Block) -> float:
    """A rank's share of a block's images, by what it saves of them; what the tensor axes share is said otherwise."""
    is_shared = profile.shares == FULL_SHARES and _saved(whole, "none") > 0
    return _saved(local, "none") / _saved(whole, "none") if is_shared else 1.0


def over_root(profile: Profile, policy: str) -> dict[str, int]:
    """What a rank holds over what it has saved at the loss (''), and in the backward of each unit of the root."""
    assert profile.source is not None
    found, saved = _peaks(profile, policy), _saved(profile.source.blocks[""], policy)
    own = _saved(profile.root, policy)
    return {name: _of_root(profile, name, size, saved) - own for name, size in found.root_bytes.items()}


def _peaks(profile: Profile, policy: str) -> Peaks:
    return peaks(profile, policy, partial(_under, policy, preserve_rng_state=False))


def _of_root(profile: Profile, name: str, num_bytes: int, saved_bytes: int) -> int:
    """A rank's part of what there is at the loss, or in the backward of the head (where classes may be split) or of
    another unit of the root, on the residual stream; `saved_bytes` of it are saved.
    """
    layer, shares = profile.layers.get(name), profile.shares
    if name and not (layer is not None and layer.is_linear):
        return int(num_bytes * shares.stream)
    return _saved(profile.root, "none") + int((num_bytes - saved_bytes) * (shares.head if name else shares.loss))


def _saved(block: Block, policy: str) -> int:
    return 0 if block.saved_bytes is None else block.saved_bytes[policy]


def _part(profile: Profile, num_bytes: int, stream_bytes: int) -> int:
    """A rank's part of what a block's backward holds beside activations: one gradient of the residual stream, and what
    lies inside of regions.
    """
    stream = min(max(0, num_bytes), stream_bytes)
    return int(stream * profile.shares.stream + (num_bytes - stream) * profile.shares.inner)
