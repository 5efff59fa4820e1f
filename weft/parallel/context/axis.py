"""Axis `context`: splits sequences over ranks, for sequences too long for one device. Each rank holds whole weights.

Everything but attention treats each token independently, so a rank computes its own tokens. Attention gets the others
by a ring of keys and values (Liu et al. 2023), or by exchanging heads for tokens (Ulysses, Jacobs et al. 2023);
`attention.py` has both and their bytes. Tokens are split zig-zag: of 2·context equal parts rank i holds parts i and
2·context - 1 - i, so that causal attention is equal work for all ranks. Labels and positions are split like their
tokens. Gradients are summed over the axis: one all-reduce of each trained slice a step, but for those of experts that
`plan.expert_over` splits over the axis.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes

from weft.comm import Axis
from weft.comm.ledger import Key
from weft.errors import PlanError
from weft.inspection.attention_interface import POSITIONS, interface_models, refuse_interface, use_attention
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.inspection.rng import ScopedRng
from weft.mesh import Mesh
from weft.models.attention import CausalAttention, LatentAttention
from weft.models.loss import IGNORE
from weft.parallel.buffer_traffic import buffer_traffic
from weft.parallel.context import closed_form
from weft.parallel.context.attention import (
    all_to_all_attention,
    all_to_all_traffic,
    ring_attention,
    ring_traffic,
    zigzag,
)
from weft.parallel.context.block_attention import Mask
from weft.parallel.expert.routing import refuse_split_sequences
from weft.parallel.model_state import all_flats
from weft.plan import BatchSplit, Context, Plan
from weft.profiling import BackwardShares, Block, Heads, Profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call
from weft.sharding.layout import COMPUTE_DTYPE
from weft.strategy import Buffer, Cost, SearchSpace, Strategy, Values, divisors, tally, uncounted_traffic

LONG_SEQUENCE = 16384  # tokens from which on a search tries `context`
_MASK = "attention_mask"
SEQUENCE_DIM = 1  # of all tensors of a batch (tokens, labels, ...): [batch, sequence, ...]


class ContextAxis(Strategy):
    """Splits sequences over `context`."""

    name = "context"
    axes = ("context",)

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        degree = plan.context.degree
        if degree == 1:
            return None
        assert profile.model is not None
        attentions = {n: m for n, m in profile.model.named_modules() if isinstance(m, CausalAttention)}
        models = interface_models(profile.model)
        if not attentions and not models:
            return (
                f"context = {degree}, but no attention of {type(profile.model).__name__} is one that weft can split "
                f"along the sequence (weft.models' CausalAttention, or transformers' attention interface); use context "
                f"= 1"
            )
        if not models and not _takes_positions(profile.model):
            return (
                f"context = {degree} tells each rank the positions of its tokens in the sequence, and the forward of "
                f"{type(profile.model).__name__} has no argument 'positions'; add it, and hand it to the part of the "
                f"model that knows positions (weft.models' GPT2 and Decoder take it), or use context = 1"
            )
        if (reason := refuse_split_sequences(profile.model, f"context = {degree}")) is not None:
            return reason
        if any(isinstance(module, LatentAttention) for module in profile.model.modules()):
            return (
                f"context = {degree} passes keys and values of one width between ranks, and those of latent attention "
                f"(deepseek_v3) differ; use context = 1"
            )
        reason = next((why for why in map(refuse_interface, models) if why is not None), None)
        if reason is not None:
            return f"context = {degree}, but {reason}; use context = 1"
        dropping = next((name for name, module in attentions.items() if module.dropout > 0), None)
        if dropping is not None:
            return f"context = {degree}, but '{dropping}' drops attention weights; set its dropout (attn_pdrop) to 0"
        if profile.counted and not profile.attentions:
            return f"context = {degree}, but the forward of {type(profile.model).__name__} calls no attention; use 1"
        return self._refuse_heads(profile, plan)

    def _refuse_heads(self, profile: Profile, plan: Plan) -> str | None:
        for name, (heads, *_) in profile.attentions.items():
            local = heads.num_heads // plan.tensor.x
            if plan.context.kind == "all-to-all" and local % plan.context.degree:
                return (
                    f"context = {plan.context.degree} with kind = 'all-to-all' does not divide the {local} heads that "
                    f"'{name}' has on each rank; use kind = 'ring' or a divisor"
                )
        return None

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        degree = plan.context.degree
        if degree == 1:
            return profile
        calls = {
            name: tuple(replace(one, rows=one.rows // degree, in_rows=one.in_rows // degree) for one in own)
            for name, own in profile.layer_calls.items()
        }
        layers = {name: own[-1] for name, own in calls.items()}
        root, *blocks = (_divide(block, degree) for block in profile.all)
        shares = BackwardShares(*(share / degree for share in profile.shares))
        numel = profile.stream_numel // degree
        parts = replace(profile, root=root, blocks=tuple(blocks), stream_numel=numel, shares=shares)
        return replace(parts, layers=layers, layer_calls=calls)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if plan.context.degree == 1:
            return Cost()
        if not profile.counted:
            given, source = f"context = {plan.context.degree}", "the attentions that a forward calls"
            raise uncounted_traffic(given, source, "context = 1")
        pairs: list[tuple[Key, int]] = [*buffer_traffic(self, profile, plan, split)]
        size = COMPUTE_DTYPE[plan.precision].itemsize
        for name, heads in ((name, one) for name, calls in profile.attentions.items() for one in calls):
            local, keys = heads.num_heads // plan.tensor.x, max(1, heads.num_key_heads // plan.tensor.x)
            tokens = heads.sequence // plan.context.degree
            if plan.context.kind == "ring":
                forward, backward = ring_traffic(heads.batch, keys, tokens, heads.head_dim, size, plan.context.degree)
            else:
                forward, backward = all_to_all_traffic(
                    heads.batch, local, keys, tokens, heads.head_dim, size, plan.context.degree
                )
            again = _num_forwards(profile, plan, name, heads)
            calls = [*(forward * again), *(backward * heads.needs_gradient)] * split.accumulation
            pairs += [(("context", operation), num_bytes) for operation, num_bytes in calls]
        return Cost(tally(pairs))

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        is_asked = bool({"context.degree", "context.kind"} & space.asked)
        is_tried = space.samples == "sequences" and (space.sequence >= LONG_SEQUENCE or is_asked)
        degrees = divisors(space.num_devices)[1:] if is_tried else ()
        kinds: list[Any] = ["ring", *(["all-to-all"] * ("context.kind" in space.asked))]
        settings = [Context(one, kind) for one in degrees if space.sequence % (2 * one) == 0 for kind in kinds]
        return [{}, *({"context": one} for one in settings)]

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        is_split = plan.context.degree > 1 and block.work.attention_flops
        return closed_form.block_calls(block, plan) if is_split else ()

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        if plan.context.degree > 1 and not software.shards_optimizer:  # else `DataAxis` reduces over both
            experts = buffer.expert_numel if "context" in plan.expert_over else 0
            if own := (buffer.numel - experts) / plan.shard.degree:
                yield Call("context", "all_reduce", own * buffer.gradient_bytes, "reduce")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        axis = mesh["context"]
        if axis.degree == 1:
            return model
        for module in model.modules():
            if isinstance(module, CausalAttention):
                setattr(module, "forward", partial(_attend, module, plan.context.kind, axis))  # noqa: B010 (to mypy)
        models = interface_models(model)
        for one in models:
            use_attention(one, partial(_attend_interface, plan.context.kind, axis))
            one.register_forward_pre_hook(partial(_add_positions, axis, POSITIONS), with_kwargs=True)
        if not models:
            model.register_forward_pre_hook(partial(_add_positions, axis, "positions"), with_kwargs=True)
        rng = ScopedRng({"context": [axis]}, mesh.device)  # every element in the model is of this rank's own tokens

        def use_own_rng(*_: Any) -> None:
            rng.begin()
            rng.enter("context")

        model.register_forward_pre_hook(use_own_rng)
        model.register_forward_hook(lambda *_: rng.end())
        for flat in all_flats(model):
            if "context" not in flat.layout.apart:
                flat.sum_over.append(axis)
        return model


def _takes_positions(model: nn.Module) -> bool:
    """May `positions` be passed by name to the model's forward?"""
    parameters = inspect.signature(model.forward).parameters.values()
    return any(one.name == "positions" or one.kind is one.VAR_KEYWORD for one in parameters)


def _divide(block: Block, degree: int) -> Block:
    saved = {kind: num_bytes // degree for kind, num_bytes in (block.saved_bytes or {}).items()}
    return replace(
        block,
        flops=block.flops // degree,
        attention_flops=block.attention_flops // degree,
        backward_flops=block.backward_flops // degree,
        saved_bytes=None if block.saved_bytes is None else saved,
    )


def _num_forwards(profile: Profile, plan: Plan, name: str, call: Heads) -> int:
    """Returns how often the forward of one call of an attention runs in a micro-batch."""
    block = next((block for block in profile.blocks if name.startswith(f"{block.name}.")), None)
    is_repeated = block is not None and block.in_backward and not call.is_last
    return 2 if is_repeated and plan.memory.repeats_collectives else 1


def own_tokens(batch: Any, axis: Axis) -> Any:
    """Returns this rank's tokens of a batch of whole sequences, with their labels and other tensors."""
    if axis.degree == 1:
        return batch
    rows = zigzag(sequence_of(batch, axis.degree), axis.degree, axis.index)

    def own(tensor: Tensor) -> Tensor:
        return tensor.index_select(SEQUENCE_DIM, rows.to(tensor.device)) if tensor.dim() else tensor

    return map_tensors(own, batch)


def sequence_of(batch: Any, degree: int) -> int:
    """Returns the length of a batch's sequences. Raises a PlanError if a tensor has no such dim to be split."""
    shapes = [list(tensor.shape) for tensor in tensors_in(batch) if tensor.dim()]
    lengths = [shape[SEQUENCE_DIM] if len(shape) > SEQUENCE_DIM else None for shape in shapes]
    length = next((one for one in lengths if one is not None), None)
    other = next((shape for shape, one in zip(shapes, lengths, strict=True) if one is None or one != length), None)
    if length is None or other is not None:
        raise PlanError(
            f"context = {degree} gives each rank a part of every sequence, so every tensor of a batch has to be "
            f"[samples, sequence, ...] with the same sequence, and the batch has tensors "
            f"{', '.join(map(str, shapes))}; give an input and a label for each position, or use context = 1"
        )
    return length


def _attend(module: CausalAttention, kind: str, axis: Axis, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Replaces a module's attention; `module.documents` must be those of the whole sequence."""
    return _compute(kind, axis, query, key, value, Mask(module.sliding_window, module.documents), None)


def _attend_interface(
    kind: str, axis: Axis, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
) -> Tensor:
    """Replaces the attention of a model of transformers. Values may have fewer or more features than keys."""
    scale, head_dim, features = query.shape[-1] ** -0.5 if scale is None else scale, query.shape[-1], value.shape[-1]
    if head_dim != features:  # zeros change no score, and add no feature that is kept
        query, key, value = (
            functional.pad(one, (0, max(head_dim, features) - one.shape[-1])) for one in (query, key, value)
        )
    return _compute(kind, axis, query, key, value, Mask(window), scale)[..., :features]


@torch._disable_dynamo  # type: ignore[attr-defined]  # collectives and the ledger are not part of a compiled graph
def _compute(
    kind: str, axis: Axis, query: Tensor, key: Tensor, value: Tensor, mask: Mask, scale: float | None
) -> Tensor:
    attention = ring_attention if kind == "ring" else all_to_all_attention
    # Selective recompute uses a dispatch mode to save the results of matmuls. Inside attention these would be scores,
    # which are large and are changed in place, so modes are disabled here.
    with _disable_current_modes():
        return attention(query, key, value, axis, mask, scale)


def _masks_nothing(mask: Any) -> bool:
    """Is this a mask [batch, sequence] of ones, as tokenizers return it for sequences without padding?"""
    return isinstance(mask, Tensor) and mask.dim() == 2 and not mask.is_floating_point() and bool(mask.all())


def _add_positions(axis: Axis, name: str, model: nn.Module, args: Any, kwargs: Any) -> Any:
    """Pass the positions of this rank's tokens in the sequence to the model, as its argument `name`."""
    bound = inspect.signature(model.forward).bind_partial(*args, **kwargs)
    given = bound.arguments  # in the order of the forward's parameters
    tokens = next(iter(given.values()), None)
    if not isinstance(tokens, Tensor) or tokens.dim() != 2:
        raise PlanError(
            f"{type(model).__name__} got no tokens [batch, sequence] as its first argument to split over context = "
            f"{axis.degree}; pass them, or use context = 1"
        )
    mask = given.get(_MASK)
    told = name if given.get(name) is not None else _MASK if mask is not None and not _masks_nothing(mask) else None
    if told is not None:
        raise PlanError(
            f"{type(model).__name__} is given {told}, and context = {axis.degree} splits sequences of one document "
            f"without padding; leave it out (the label of a token that does not count is {IGNORE}), or use context = 1"
        )
    if mask is not None:
        given[_MASK] = None
        args, kwargs = bound.args, bound.kwargs
    sequence = tokens.shape[SEQUENCE_DIM] * axis.degree
    positions = zigzag(sequence, axis.degree, axis.index).to(tokens.device)
    return args, {**kwargs, name: positions[None] if name == POSITIONS else positions}
