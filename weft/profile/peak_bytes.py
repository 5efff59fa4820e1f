"""The most that a model holds in one forward and backward, by moment: run on fake tensors, with shapes but no data.

Saved bytes are what backward needs; the peak lies above them. At the loss there are the logits' gradients, and in a
block's backward the gradients inside of it and, with recompute, its activations once more. Both are found by running
forward, loss and backward on shapes under the memory policy itself, and adding up the tensors alive after each
operation. A gradient of a parameter is taken from it as soon as it is there, as units do.

Of blocks that are alike only the first and the last run; the others hand their input on. The backward of a compiled
block holds what its graph says (`partition.py`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from weft.inspection.blocks import find_blocks, find_units
from weft.inspection.functional_call import call_with
from weft.inspection.live_bytes import LiveTensors
from weft.models.loss import fused_rows_loss, rows_loss
from weft.models.loss_head import example_labels, loss_head_of
from weft.profile import Block, Profile, Source, cast, fake
from weft.profile.saved_in_pieces import as_in_pieces

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # a block's forward to the same under a memory policy


@dataclass(frozen=True)
class Peaks:
    """By moment; parameters are left out, and their gradients but for those named here.

    `root_bytes`: over what blocks have saved, at the loss ('') and in the backward of each of the root's units behind
    them. `end_bytes`: in that of its units before them, when nothing is saved any more. `block_bytes`: in the backward
    of each block over what there was before its input. `stream_bytes`: of that input. `tied_bytes`: gradients of the
    root's parameters that are used twice, which wait for their second half through all blocks, over `block_bytes`.
    """

    root_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: int = 0
    stream_bytes: int = 0
    tied_bytes: int = 0
    block_bytes: dict[str, int] = field(default_factory=dict)


def peaks(profile: Profile, policy: str, wrap: Wrap) -> Peaks:
    """The peaks of the model that a profile, or one of a stage, was taken of; nothing if it was without a loss."""
    return Peaks() if profile.source is None else _found(profile.source, policy, wrap)


def _found(source: Source, policy: str, wrap: Wrap) -> Peaks:
    if policy not in source.found:
        eager = source.eager
        if eager is not None and loss_head_of(eager.model) is None:  # nothing but blocks holds anything else compiled
            ran = _found(eager, policy, wrap)
        else:
            ran = _run(eager or source, policy, wrap, eager is not None)
        source.found[policy] = _compiled(ran, source.blocks)
    found: Peaks = source.found[policy]
    return found


def _compiled(found: Peaks, blocks: Mapping[str, Block]) -> Peaks:
    """Peaks with those of compiled blocks in the places of theirs: computed again, a block holds what it would keep."""
    kept = {name: (blocks[name].saved_bytes or {}).get("none", 0) for name in found.block_bytes}
    over = {name: blocks[name].backward_bytes for name in found.block_bytes}
    mine = {name: kept[name] + one for name, one in over.items() if one is not None}
    return replace(found, block_bytes={**found.block_bytes, **mine})


def _run(source: Source, policy: str, wrap: Wrap, is_loss_fused: bool) -> Peaks:
    groups, step = _alike(block for name, block in source.blocks.items() if name), _Step(source)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: cast(fake(parameter), source.dtype) for name, parameter in step.named_parameters()}
        state |= {name: fake(buffer) for name, buffer in step.named_buffers()}
        for tensor in state.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_take)
        watch = _Watch(LiveTensors(ignored=state.values()))
        watched = _watched(source.model, groups, wrap, watch)
        pieces = as_in_pieces() if source.in_pieces else nullcontext()
        with watched, _loss(source.model, is_loss_fused), pieces, watch.live, torch.enable_grad():
            call_with(step, state, ())
            watch.note()
    ran = (block for name, block in source.blocks.items() if name in watch.began)
    saved = sum((block.saved_bytes or {})[policy] for block in ran)
    tied = _tied_bytes(source)
    most = {name: max(watch.over_began(one, tied) for one in names) for names in groups for name in names}
    order = list(watch.most)  # of moments
    first = min((order.index(name) for name in order if name and name in source.blocks), default=len(order))
    root = {name: watch.most[name] - saved for name in order[:first]}
    end = max((watch.most[name] for name in order[first:] if name not in source.blocks), default=0)
    return Peaks(root, end, watch.stream_bytes, tied, most)


@contextmanager
def _loss(model: nn.Module, is_fused: bool) -> Iterator[None]:
    """While it lasts, the head's loss takes what it takes compiled, or not."""
    head = loss_head_of(model)
    if head is None or not is_fused:
        yield
        return
    head.fake_rows = fused_rows_loss
    try:
        yield
    finally:
        head.fake_rows = rows_loss


def _tied_bytes(source: Source) -> int:
    places = Counter(id(parameter) for _, parameter in source.model.named_parameters(remove_duplicate=False))
    own = {parameter.name for parameter in source.blocks[""].parameters if parameter.trainable}
    named = source.model.named_parameters()
    tied = [parameter for name, parameter in named if name in own and places[id(parameter)] > 1]
    return sum(parameter.numel() * (source.dtype or parameter.dtype).itemsize for parameter in tied)


def _alike(blocks: Iterable[Block]) -> list[list[str]]:
    """The names of blocks that are alike in all that was counted of them, in order."""
    groups: dict[Any, list[str]] = {}
    for block in blocks:
        shapes = tuple((parameter.shape, parameter.trainable) for parameter in block.parameters)
        saved = tuple((block.saved_bytes or {}).items())
        groups.setdefault((shapes, saved, block.flops, block.calls, block.in_backward), []).append(block.name)
    return list(groups.values())


class _Step(nn.Module):
    """Forward, loss and backward, all while other parameters stand in the model: recompute needs them in backward."""

    def __init__(self, source: Source) -> None:
        super().__init__()
        self.model, self.source = source.model, source

    def forward(self) -> None:
        args = tree_map(partial(cast, dtype=self.source.dtype), self.source.example())
        with example_labels(self.model, self.source.finish):
            output = self.model(*(args if isinstance(args, tuple) else (args,)))
        total = next(leaf for leaf in tree_leaves(self.source.finish(output)) if leaf.requires_grad)
        del output, args
        total.backward()


def _take(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _watched(model: nn.Module, groups: list[list[str]], wrap: Wrap, watch: _Watch) -> Iterator[None]:
    """The blocks under a policy, with their beginnings and ends told to `watch`, and those of the root's units."""
    blocks, units = find_blocks(model), find_units(model)
    hooks = {name: partial(watch.leave, name) for name in units if name not in blocks}
    handles = [units[name].register_forward_hook(hook) for name, hook in hooks.items()]
    before = {name: block.__dict__.get("forward") for name, block in blocks.items()}
    for names in groups:
        for name in names:
            forward = partial(watch.run, name, wrap(blocks[name].forward))
            if name not in (names[0], names[-1]):
                forward = partial(watch.hand_on, names[0], forward)
            setattr(blocks[name], "forward", forward)  # noqa: B010 (a method to mypy)
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for name, block in blocks.items():
            del block.__dict__["forward"]
            if before[name] is not None:
                setattr(block, "forward", before[name])  # noqa: B010


class _Watch:
    """Cuts a run into moments: the loss (behind the last forward), and the backward of each block."""

    def __init__(self, live: LiveTensors) -> None:
        self.live = live
        self.began: dict[str, int] = {}
        self.most: dict[str, int] = {"": 0}
        self.stream_bytes = 0
        self._moment = ""
        self._keeps_form: dict[str, bool] = {}  # whether a block gives what it is given, in form

    def run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A block's forward."""
        given = args[0].untyped_storage().nbytes() if args and isinstance(args[0], Tensor) else 0
        self.began.setdefault(name, self.live.now_bytes - given)
        self.stream_bytes = max(self.stream_bytes, given)
        output = forward(*args, **kwargs)
        self.leave(name, None, None, output)
        first = args[0] if args else None
        self._keeps_form[name] = _form(output) is not None and _form(output) == _form(first)
        del first
        self.live.restart()
        return output

    def leave(self, name: str, _: object, __: object, output: Any) -> None:
        """A unit has its result: when that gets its gradient, its backward begins."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._begin_backward, name))

    def hand_on(self, like: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """In the place of a block like another."""
        return args[0].view_as(args[0]) if self._keeps_form[like] else forward(*args, **kwargs)

    def over_began(self, name: str, carried_bytes: int) -> int:
        """The most in a block's backward, without what comes from behind it; nothing for one that has no backward."""
        return self.most[name] - self.began[name] - carried_bytes if name in self.most else 0

    def _begin_backward(self, name: str, _: Tensor) -> None:
        self.note()
        self._moment = name

    def note(self) -> None:
        """The moment has passed."""
        self.most[self._moment] = max(self.most.get(self._moment, 0), self.live.peak_bytes)
        self.live.restart()


def _form(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
