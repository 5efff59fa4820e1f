"""Traces of the modules in which branches are looked for.

A *region* is a module whose branches begin and meet inside of it: all ranks of `branch` have its inputs, and all get
its results. It is the whole model (its name is ''), or with `pipe` or recompute each block, because stages and
checkpoints run blocks one by one. Branches that begin in one block and meet in another one are then not found.

If `x` splits the model, the traced model is split in the same way, for one rank of `x`. Every rank of `x` has the same
operations, and they differ in the shapes of split tensors at most. A layer that communicates over `x` is traced, and
later run or skipped, as one operation (`as_operations`): its forward has collectives, and functions whose backward has
some. All ranks of `x` have the same index on `branch`, so they skip the layer together.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils._pytree import tree_map

from weft.errors import PlanError
from weft.inspection.functional_call import arguments
from weft.inspection.nested_tensors import tensors_in
from weft.inspection.tensor_splits import Pairing
from weft.parallel.branch.batch_dims import all_samples
from weft.parallel.tensor.axis import dry_split
from weft.pipeline.stand_in import skeleton
from weft.pipeline.trace import Trace
from weft.pipeline.trace_watch import FOR_BRANCHES
from weft.pipeline.tracer import Tracer
from weft.plan import Plan, Precision
from weft.plan import Tensor as TensorPlan
from weft.profiling import Profile, ProfileCache, TensorMetadata
from weft.sharding.layout import COMPUTE_DTYPE

WHOLE = ""  # the region of a whole model
_MODELS = ProfileCache[tuple[TensorPlan, int], nn.Module]()  # by axes and rank of x
_TRACES = ProfileCache[tuple[Precision, TensorPlan, int, str, int], Trace]()  # by the arguments of `region_trace`


def whole_of(profile: Profile) -> Profile:
    """Returns the profile of the whole model; `profile` may be that of a pipeline stage."""
    return profile.whole or profile


def is_in_blocks(plan: Plan) -> bool:
    """Is each block of a model a region, instead of the whole model?"""
    return plan.pipe.degree > 1 or plan.memory.recompute != "none"


def region_names(whole: Profile, plan: Plan) -> tuple[str, ...]:
    """Returns the names of a model's regions. A block that a forward calls several times is none."""
    if not is_in_blocks(plan):
        return (WHOLE,)
    return tuple(block.name for block in whole.blocks if block.calls == 1 and block.name in whole.given)


def within(region: str, names: Iterable[str]) -> dict[str, str]:
    """Returns the names that lie inside of a region, by their names relative to it."""
    start = f"{region}." if region else ""
    return {name.removeprefix(start): name for name in names if name.startswith(start)}


def traced_model(whole: Profile, plan: Plan, x: int) -> nn.Module:
    """Returns the model that is traced for rank `x` of the axis: a copy that is split, or the model if it is not."""
    assert whole.model is not None
    if plan.tensor.x == 1:
        return whole.model
    model = whole.model

    def split() -> nn.Module:
        made = dry_split(model, plan, x, whole._proofs)
        as_operations(made, split_names(whole, plan))
        return made

    return _MODELS.get(whole, (plan.tensor, x), split)


def split_names(whole: Profile, plan: Plan) -> tuple[str, ...]:
    """Returns the modules that communicate over `x`: each is one operation."""
    return () if plan.tensor.x == 1 else split_layers(whole.pairing)


def region_tracer(whole: Profile, plan: Plan, region: str, x: int) -> Tracer:
    """Returns a tracer of a region for a run, which may change the profile's model afterwards."""
    model = traced_model(whole, plan, x).get_submodule(region)
    return Tracer(skeleton(model) if plan.tensor.x == 1 else model, plan, 1, purpose=FOR_BRANCHES)


def region_trace(whole: Profile, plan: Plan, region: str, x: int = 0, times: int = 1) -> Trace:
    """Returns the trace of a region with the profile's example, or with so many times as many samples."""

    def traced() -> Trace:
        tracer = Tracer(traced_model(whole, plan, x).get_submodule(region), plan, 1, purpose=FOR_BRANCHES)
        args, kwargs = _inputs(whole, region, plan, times)
        return tracer.own(args, kwargs, torch.device("cpu"))

    return _TRACES.get(whole, (plan.precision, plan.tensor, x, region, times), traced)


def _inputs(whole: Profile, region: str, plan: Plan, times: int) -> tuple[Any, Any]:
    """Returns the arguments of a region, with `times` times the samples of the profile's example.

    If that is more than once, the first dim of every tensor that a block is given must be that of samples.
    """
    assert whole.example is not None
    if region == WHOLE:
        return arguments(all_samples(whole.example(), times))
    num_samples = {one.shape[0] for one in tensors_in(whole.example()) if one.dim()} if times > 1 else set[int]()

    def empty(form: Any) -> Any:
        if not isinstance(form, TensorMetadata):
            return form
        shape, dtype = form.shape, form.dtype
        if times > 1 and shape and shape[0] not in num_samples:
            raise PlanError(
                f"branch.batch = 'split': block '{region}' is given a tensor {list(shape)} whose first dim is not that "
                f"of samples, {sorted(num_samples)}; use branch.batch = 'same'"
            )
        shape = (times * shape[0], *shape[1:]) if shape else shape
        dtype = COMPUTE_DTYPE[plan.precision] if dtype.is_floating_point else dtype
        return torch.empty(shape, dtype=dtype).requires_grad_(form.requires_grad)

    args, kwargs = tree_map(empty, whole.given[region])
    return args, kwargs


def common_parameters(whole: Profile, region: str) -> frozenset[str]:
    """Returns the parameters in a region that code outside of it uses, too, by their names in the region."""
    if region == WHOLE:
        return frozenset()
    assert whole.model is not None
    holders: dict[int, set[str]] = {}
    for name, parameter in whole.model.named_parameters(remove_duplicate=False):
        holders.setdefault(id(parameter), set()).add(name)
    start = f"{region}."
    tied = {one for names in holders.values() if any(not one.startswith(start) for one in names) for one in names}
    return frozenset(within(region, tuple(tied | whole.read_outside)))


def split_layers(pairing: Pairing) -> tuple[str, ...]:
    """Returns the names of the modules whose forwards communicate, without those that lie in another one."""
    parents = {split.parent for split in pairing.splits.values() if split.parent is not None}
    names = {*pairing.splits, *pairing.embeddings, *parents}
    return tuple(sorted(name for name in names if not any(name.startswith(f"{other}.") for other in names)))


def as_operations(model: nn.Module, names: Iterable[str]) -> None:
    """Make the forward of each named module one operation. Names that the model does not have are passed over."""
    modules = dict(model.named_modules())
    for module in (modules[name] for name in names if name in modules):
        setattr(module, "forward", _OneOperation(module))  # noqa: B010 (a method to mypy)


class _OneOperation:
    """A module's forward, which a watch sees as one operation."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._forward = module, module.forward
        self.__name__ = f"split {type(module).__name__}"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        parameters = tuple(self._module.parameters())
        given = [*parameters, *tensors_in((args, kwargs))]
        if not has_torch_function(given):
            return self._forward(*args, **kwargs)
        return handle_torch_function(_WholeForward(self.__name__, self._forward), given, parameters, args, kwargs)


class _WholeForward:
    """The operation: parameters are among its arguments so that a watch sees them."""

    def __init__(self, name: str, forward: Any) -> None:
        self.__name__, self._forward = name, forward

    def __call__(self, parameters: Sequence[Tensor], args: Any, kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)
