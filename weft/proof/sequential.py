"""Trains the unsplit model with torch's own functions and none of weft's. Proofs compare plans with it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.hooks import RemovableHandle

from weft.errors import PlanError
from weft.inspection.blocks import find_blocks
from weft.inspection.functional_call import in_mode
from weft.inspection.nested_tensors import map_tensors, tensors_in
from weft.models.router import change_biases, set_used
from weft.proof.float64 import Float64
from weft.step.batch import Batch, num_samples, take_samples
from weft.step.objective import Objective, counts_of, training_total
from weft.step.used_tokens import used_of_batch

LEARNING_RATE = 1e-2
# AdamW's epsilon. With the usual 1e-8, rounding noise of 1e-17 in a gradient of zero moves a parameter by a billionth
# of a step.
EPSILON = 1e-6

ModelFn = Callable[[], nn.Module]
BatchFn = Callable[[int], Batch]


@dataclass
class SequentialResult:
    """Losses and gradient norms of all steps, gradients of the first step, and parameters and buffers after the last.

    `num_samples` is the most that a forward had. `changed` names the buffers that forwards changed, and `made` those
    that they registered. `measured` are the means of the objective's measures on the first batch, evaluated after the
    steps, and `outputs` the tensors with dims that it returned, part by part. `calls` counts the calls of each block
    ("" is the model) and of linears outside of blocks for the first part of the first batch, in forward and in
    backward. `notes`, `draws` and `inner_gradients` are those of `Float64`.
    """

    num_samples: int
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    changed: frozenset[str] = frozenset()
    made: tuple[str, ...] = ()
    measured: list[float] = field(default_factory=list)
    outputs: list[list[Tensor]] = field(default_factory=list)
    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    notes: tuple[str, ...] = ()
    draws: tuple[str, ...] = ()
    inner_gradients: tuple[str, ...] = ()


def run_sequential(
    model: nn.Module,
    batch_fn: BatchFn,
    objective: Objective,
    steps: int,
    clip: float | None,
    part: int,
    replicas: Sequence[int],
    rounding: int = 0,
    keeps_casts: bool = False,
) -> SequentialResult:
    """Trains the model for some steps, with `part` samples of a batch at a time, and returns the results.

    `part` is the whole batch, unless batch norms should see micro-batches. Part i of a batch then updates the running
    statistics of `replicas[i]`, if replicas are given. A `rounding` that is not 0 changes only how results are rounded
    (`RoundedOtherwise`). `keeps_casts` leaves casts to narrower types inside of the model as they are, as compiled
    blocks do.
    """
    optimizer, statistics, found = make_optimizer(model), _Statistics(model, replicas), SequentialResult(part)
    wide = Float64(is_wide=not keeps_casts)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    rounded = RoundedOtherwise(model, rounding) if rounding else None
    for step in range(steps):
        batch = to_double(batch_fn(step))
        parts = _parts(batch, part, rounded)
        scales = 1 / counts_of(objective, [batch], [used_of_batch(objective, model, [model], batch)]).clamp(min=1)
        loss = torch.zeros((), dtype=torch.float64, device=scales.device)
        for number, own in enumerate(parts):
            calls = found.calls if step == number == 0 else None
            with statistics.of(number), _counting(model, calls), rounded or nullcontext(), wide:
                set_used([model], used_of_batch(objective, model, [model], own))
                mean = training_total(objective, model, own, scales) * scales[0]
                mean.backward()
                set_used([model], None)
            loss += mean.detach()
        statistics.average()
        norm = nn.utils.clip_grad_norm_(model.parameters(), clip if clip is not None else float("inf"))
        if step == 0:
            found.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        change_biases([model], lambda counts: None)
        found.losses.append(loss.item())
        found.norms.append(norm.item())
    # Copies, because the forwards of an evaluation may change parameters (an embedding's max_norm).
    found.parameters = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    found.buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    found.changed = frozenset(name for name, old in before.items() if not _is_equal(old, found.buffers[name]))
    found.made = tuple(name for name in found.buffers if name not in before)
    batch = to_double(batch_fn(0))
    with wide:
        _evaluate(model, batch, objective, part, found)
    found.notes, found.draws, found.inner_gradients = wide.notes, tuple(wide.draws), tuple(wide.gradients)
    return found


def _parts(batch: Batch, part: int, rounded: RoundedOtherwise | None) -> list[Batch]:
    """Returns a batch in parts of so many samples; for another rounding, the samples of each part in another order."""
    starts = range(0, num_samples(batch), part)
    if rounded is None:
        return [take_samples(batch, slice(start, start + part)) for start in starts]
    return [take_samples(batch, start + rounded.order(part)) for start in starts]


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


@contextmanager
def _counting(model: nn.Module, calls: Counter[tuple[str, str]] | None) -> Iterator[None]:
    """Count the calls of the model, its blocks and the linears outside of them inside the context, unless `calls` is
    None.
    """
    if calls is None:
        yield
        return

    def count(name: str, *_: object) -> None:
        calls[name, "forward" if torch._C._current_graph_task_id() == -1 else "backward"] += 1

    blocks = find_blocks(model)
    inside = tuple(f"{name}." for name in blocks)
    linears = {
        name: one for name, one in model.named_modules() if type(one) is nn.Linear and not name.startswith(inside)
    }
    handles = [one.register_forward_pre_hook(partial(count, name)) for name, one in {**linears, **blocks}.items()]
    handles.append(model.register_forward_pre_hook(partial(count, "")))
    yield
    for handle in handles:
        handle.remove()


def _evaluate(model: nn.Module, batch: Batch, objective: Objective, part: int, found: SequentialResult) -> None:
    measure = objective.measure or objective.total

    def keep(_: nn.Module, __: Any, output: Any) -> None:
        if len(found.outputs) < len(totals) + 1:  # the first call of each part
            found.outputs.append([tensor.clone() for tensor in tensors_in(output) if tensor.dim()])

    totals: list[Tensor] = []
    handle = model.register_forward_hook(keep)
    try:
        with in_mode(model, training=False), torch.no_grad():
            for own in _parts(batch, part, None):
                totals.append(measure(model, own).double())
    except RuntimeError as error:
        if "does not require grad" in str(error):
            raise PlanError(
                f"the objective fails in an evaluation, where torch computes no gradients ({error}); give Objective a "
                f"measure, or let total leave gradients out where torch.is_grad_enabled() is False"
            ) from error
        raise
    handle.remove()
    found.measured = (torch.stack(totals).sum(0) / objective.count(batch)).flatten().tolist()


class _Statistics:
    """A model's buffers (running statistics), one copy for each mirrored replica.

    Each replica's micro-batches update its copy. At the end of a step all copies become their mean.
    """

    def __init__(self, model: nn.Module, replicas: Sequence[int]) -> None:
        self._replicas, self._buffers = replicas, list(model.buffers())
        self._copies = [[buffer.clone() for buffer in self._buffers] for _ in set(replicas)]

    @contextmanager
    def of(self, part: int) -> Iterator[None]:
        """Inside the context, part `part` of the batch runs with its replica's buffers."""
        own = self._copies[self._replicas[part]] if self._copies else []
        pairs = list(zip(self._buffers, own, strict=True)) if own else []
        for buffer, copy in pairs:
            buffer.copy_(copy)
        yield
        for buffer, copy in pairs:
            copy.copy_(buffer)

    def average(self) -> None:
        """Set all copies to their mean, at the end of a step."""
        for all_copies in zip(self._buffers, *self._copies, strict=True) if self._copies else ():
            total = torch.stack(all_copies[1:]).sum(0)
            rounding = None if total.is_floating_point() else "floor"
            for copy in all_copies:
                copy.copy_(total.div(len(self._copies), rounding_mode=rounding))


def make_model(model_fn: ModelFn) -> nn.Module:
    """Returns a new model in float64. Its parameters have the same values on every call."""
    torch.manual_seed(0)
    model = model_fn()
    if not isinstance(model, nn.Module):
        raise PlanError(f"model_fn() returned a {type(model).__name__}; it has to return a new torch.nn.Module")
    return model.double()


def make_optimizer(model: nn.Module) -> Optimizer:
    """Returns the optimizer with which both sides of a proof train."""
    trained: list[Tensor] = [p for p in model.parameters() if p.requires_grad]
    trained = trained or [torch.zeros(0, requires_grad=True)]  # a frozen stage has none
    return AdamW(trained, lr=LEARNING_RATE, eps=EPSILON, fused=True)


def to_double(batch: Batch) -> Batch:
    """Returns a batch with its floating-point tensors in float64."""
    return map_tensors(lambda tensor: tensor.to(double_of(tensor.dtype)), batch)


def double_of(dtype: torch.dtype) -> torch.dtype:
    """Returns float64 for a floating-point dtype; any other dtype unchanged."""
    return torch.float64 if dtype.is_floating_point else dtype


NUM_RUNS = 3  # runs of the unsplit model, each rounded in another way
ULP = 2.0**-52  # relative distance of neighbouring float64 numbers


class RoundedOtherwise:
    """Rounds the unsplit model in another way: how far its results then are from before is its noise.

    Three things change, each by a random number of the run: the order of the samples in a batch (`order`); every
    parameter, by one unit in its last place, when the object is made; and, inside the context, the gradient of each
    result of a module, by one unit in the last place of each element. The last one measures sums whose terms cancel.
    For example, the bias of attention keys, or of a convolution before batch norm, has no gradient in theory: in
    floating point it is a unit in the last place of the terms, whatever their sum. AdamW makes steps of it in some
    direction, which nothing determines.
    """

    def __init__(self, model: nn.Module, seed: int) -> None:
        self._model, self._rng = model, torch.Generator().manual_seed(seed)
        self._handles: list[RemovableHandle] = []
        with torch.no_grad():
            for parameter in filter(Tensor.is_floating_point, model.parameters()):
                parameter.copy_(self._moved(parameter))

    def order(self, count: int) -> Tensor:
        """Returns a random order of so many samples."""
        return torch.randperm(count, generator=self._rng)

    def __enter__(self) -> None:
        for module in self._model.modules():
            self._handles.append(module.register_forward_hook(self._hook_result))

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook_result(self, module: nn.Module, args: Any, result: Any) -> None:
        for tensor in tensors_in(result):
            if tensor.requires_grad and not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                tensor.register_hook(self._moved)

    def _moved(self, value: Tensor) -> Tensor:
        """Returns each element, one unit in its last place away at random."""
        signs = torch.randint(0, 2, value.shape, generator=self._rng).to(value.device) * 2 - 1
        return value * (1 + ULP * signs)
