"""Peak memory of a model in one forward and backward, for each phase, measured on fake tensors.

The peak is above the saved activations. At the loss there are also the gradients of the logits. In a block's backward
there are also the gradients inside of it and, with recompute, its activations once more. Both are measured: forward,
loss and backward run on fake tensors under the memory policy, and the bytes of live tensors are added up after each
operation. The gradient of a parameter is freed as soon as it is complete, as units of a run do.

Of equal blocks only the first and the last run; the others return their input. For a compiled block, the peak of
backward follows from its graph (`compile/torch_partition.py`).
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
from weft.inspection.functional_call import arguments, call_with
from weft.inspection.live_bytes import LiveTensors
from weft.models.loss import fused_rows_loss, rows_loss
from weft.models.loss_head import example_labels, loss_head_of
from weft.profiling import Block, Profile, ProfileCache, ProfileSource, cast, fake
from weft.profiling.fused_attention import attention_of_a_gpu
from weft.profiling.saved_in_pieces import as_in_pieces

Wrap = Callable[[Callable[..., Any]], Callable[..., Any]]  # applies a memory policy to a block's forward


@dataclass(frozen=True)
class Peaks:
    """Peak bytes of each phase, without parameters, and without their gradients except `tied_bytes`.

    `root_bytes`: at the loss ('') and in the backward of each unit of the root after the blocks, above the activations
    that blocks have saved. `end_bytes`: in the backward of the root's units before the blocks, when no saved activation
    is left. `block_bytes`: in the backward of each block, above the bytes that were live before its input.
    `stream_bytes`: the size of a block's input. `tied_bytes`: gradients of root parameters that are used twice. Such a
    gradient is live during the backward of all blocks, until its second part is added; it is not in `block_bytes`.
    """

    root_bytes: dict[str, int] = field(default_factory=dict)
    end_bytes: int = 0
    stream_bytes: int = 0
    tied_bytes: int = 0
    block_bytes: dict[str, int] = field(default_factory=dict)


_PEAKS = ProfileCache[str, Peaks]()  # by policy
_ROOT_PEAKS = ProfileCache[None, Peaks]()  # those of the root beside compiled blocks


def peaks(profile: Profile, policy: str, wrap: Wrap) -> Peaks:
    """Returns the peaks of the model that a profile (or its stage's profile) was taken of; empty without a loss.

    `policy` is a value of `memory.recompute`, and `wrap` applies it to a block's forward.
    """
    return Peaks() if profile.source is None else _peaks_of(profile.source, policy, wrap)


def _peaks_of(source: ProfileSource, policy: str, wrap: Wrap) -> Peaks:
    def ran() -> Peaks:
        eager = source.eager
        if eager is None:
            return _run(source, policy, wrap)
        if all(block.backward_bytes is not None for name, block in source.blocks.items() if name):
            return _with_compiled_blocks(_root_peaks(eager), source.blocks)
        if loss_head_of(eager.model) is None:  # compiling changes blocks only
            return _with_compiled_blocks(_peaks_of(eager, policy, wrap), source.blocks)
        return _with_compiled_blocks(_run(eager, policy, wrap, is_loss_fused=True), source.blocks)

    return _PEAKS.get(source, policy, ran)


def _root_peaks(eager: ProfileSource) -> Peaks:
    """Returns the peaks of a model with a compiled loss, of which only those of the root are valid.

    The root's peaks are above all that blocks have saved, so they are the same under every memory policy. One block of
    each kind runs.
    """
    return _ROOT_PEAKS.get(
        eager, None, lambda: _run(eager, "none", lambda forward: forward, is_loss_fused=True, runs_last=False)
    )


def _with_compiled_blocks(found: Peaks, blocks: Mapping[str, Block]) -> Peaks:
    """Returns the peaks with those of compiled blocks replaced.

    A compiled block's peak is the activations that it saves without recompute, plus what its backward adds: recompute
    holds the same activations again.
    """
    kept = {name: (blocks[name].saved_bytes or {}).get("none", 0) for name in found.block_bytes}
    added = {name: blocks[name].backward_bytes for name in found.block_bytes}
    mine = {name: kept[name] + one for name, one in added.items() if one is not None}
    return replace(found, block_bytes={**found.block_bytes, **mine})


def _run(source: ProfileSource, policy: str, wrap: Wrap, is_loss_fused: bool = False, runs_last: bool = True) -> Peaks:
    groups, step = _equal_blocks(block for name, block in source.blocks.items() if name), _Step(source)
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: cast(fake(parameter), source.dtype) for name, parameter in step.named_parameters()}
        state |= {name: fake(buffer) for name, buffer in step.named_buffers()}
        for tensor in state.values():
            if tensor.requires_grad:
                tensor.register_post_accumulate_grad_hook(_free_gradient)
        recorder = _PeakRecorder(LiveTensors(ignored=state.values()))
        recording = _recording(source.model, groups, wrap, recorder, runs_last)
        pieces = as_in_pieces() if source.in_pieces else nullcontext()
        with (
            recording,
            _loss(source.model, is_loss_fused),
            pieces,
            recorder.live,
            torch.enable_grad(),
            attention_of_a_gpu(),
        ):
            call_with(step, state, ())
            recorder.note()
    ran = (block for name, block in source.blocks.items() if name in recorder.start_bytes)
    saved = sum((block.saved_bytes or {})[policy] for block in ran)
    tied = _tied_bytes(source)
    peak_bytes: dict[str, int] = {}
    for names in groups:  # blocks that did not run count as the larger of those that did
        own = {name: recorder.peak_above_start(name, tied) for name in names if name in recorder.start_bytes}
        peak_bytes |= {name: own.get(name, max(own.values(), default=0)) for name in names}
    order = list(recorder.peak_bytes)  # phases, in order
    first = min((order.index(name) for name in order if name and name in source.blocks), default=len(order))
    root = {name: recorder.peak_bytes[name] - saved for name in order[:first]}
    end = max((recorder.peak_bytes[name] for name in order[first:] if name not in source.blocks), default=0)
    return Peaks(root, end, recorder.stream_bytes, tied, peak_bytes)


@contextmanager
def _loss(model: nn.Module, is_fused: bool) -> Iterator[None]:
    """Inside the context, the head's loss allocates the memory of its compiled (`is_fused`) or its eager version."""
    head = loss_head_of(model)
    if head is None or not is_fused:
        yield
        return
    head.fake_rows = fused_rows_loss
    try:
        yield
    finally:
        head.fake_rows = rows_loss


def _tied_bytes(source: ProfileSource) -> int:
    places = Counter(id(parameter) for _, parameter in source.model.named_parameters(remove_duplicate=False))
    own = {parameter.name for parameter in source.blocks[""].parameters if parameter.trainable}
    named = source.model.named_parameters()
    tied = [parameter for name, parameter in named if name in own and places[id(parameter)] > 1]
    return sum(parameter.numel() * (source.dtype or parameter.dtype).itemsize for parameter in tied)


def _equal_blocks(blocks: Iterable[Block]) -> list[list[str]]:
    """Returns the names of blocks in groups of equal counts and parameter shapes, in order."""
    groups: dict[Any, list[str]] = {}
    for block in blocks:
        shapes = tuple((parameter.shape, parameter.trainable) for parameter in block.parameters)
        saved = tuple((block.saved_bytes or {}).items())
        groups.setdefault((shapes, saved, block.flops, block.calls, block.in_backward), []).append(block.name)
    return list(groups.values())


class _Step(nn.Module):
    """Forward, loss and backward in one module call.

    The model's parameters are replaced during the call, and recompute needs the replaced ones in backward, too.
    """

    def __init__(self, source: ProfileSource) -> None:
        super().__init__()
        self.model, self.source = source.model, source

    def forward(self) -> None:
        args, kwargs = arguments(tree_map(partial(cast, dtype=self.source.dtype), self.source.example()))
        with example_labels(self.model, self.source.finish):
            output = self.model(*args, **kwargs)
        total = next(leaf for leaf in tree_leaves(self.source.finish(output)) if leaf.requires_grad)
        del output, args, kwargs
        total.backward()


def _free_gradient(parameter: Tensor) -> None:
    parameter.grad = None


@contextmanager
def _recording(
    model: nn.Module, groups: list[list[str]], wrap: Wrap, recorder: _PeakRecorder, runs_last: bool
) -> Iterator[None]:
    """Inside the context, blocks run under the policy `wrap`, and blocks and root units report to `recorder`.

    Of each group of equal blocks the first runs, and the last if `runs_last`.
    """
    blocks, units = find_blocks(model), find_units(model)
    hooks = {name: partial(recorder.leave, name) for name in units if name not in blocks}
    handles = [units[name].register_forward_hook(hook) for name, hook in hooks.items()]
    before = {name: block.__dict__.get("forward") for name, block in blocks.items()}
    for names in groups:
        for name in names:
            forward = partial(recorder.run, name, wrap(blocks[name].forward))
            if name != names[0] and not (runs_last and name == names[-1]):
                forward = partial(recorder.skip, names[0], forward)
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


class _PeakRecorder:
    """Measures the peak of each phase of a run: the loss (after the last forward), and the backward of each unit."""

    def __init__(self, live: LiveTensors) -> None:
        self.live = live
        self.start_bytes: dict[str, int] = {}  # block -> live bytes before its input
        self.peak_bytes: dict[str, int] = {"": 0}  # phase -> peak bytes; the loss is ""
        self.stream_bytes = 0
        self._moment = ""
        self._keeps_form: dict[str, bool] = {}  # whether a block's output has its input's shape and dtype

    def run(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a block's forward, and record the live bytes before it."""
        given = args[0].untyped_storage().nbytes() if args and isinstance(args[0], Tensor) else 0
        self.start_bytes.setdefault(name, self.live.now_bytes - given)
        self.stream_bytes = max(self.stream_bytes, given)
        output = forward(*args, **kwargs)
        self.leave(name, None, None, output)
        first = args[0] if args else None
        self._keeps_form[name] = _form(output) is not None and _form(output) == _form(first)
        del first
        self.live.restart()
        return output

    def leave(self, name: str, _: object, __: object, output: Any) -> None:
        """Register hooks on a unit's output: its backward begins when the output's gradient is complete."""
        for leaf in tree_leaves(output):
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf.register_hook(partial(self._begin_backward, name))

    def skip(self, like: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Forward of a block that equals the block `like`: returns its input if shapes allow, else runs `forward`."""
        return args[0].view_as(args[0]) if self._keeps_form[like] else forward(*args, **kwargs)

    def peak_above_start(self, name: str, carried_bytes: int) -> int:
        """Returns the peak of a block's backward above `carried_bytes` and the bytes before its input.

        It is 0 for a block without a backward.
        """
        return self.peak_bytes[name] - self.start_bytes[name] - carried_bytes if name in self.peak_bytes else 0

    def _begin_backward(self, name: str, _: Tensor) -> None:
        self.note()
        self._moment = name

    def note(self) -> None:
        """End a phase: keep its peak."""
        self.peak_bytes[self._moment] = max(self.peak_bytes.get(self._moment, 0), self.live.peak_bytes)
        self.live.restart()


def _form(value: Any) -> tuple[torch.Size, torch.dtype] | None:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else None
