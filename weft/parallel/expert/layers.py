"""The layers of experts that `expert` can split: their parameters on each rank, and their all-to-alls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm import Axis
from weft.comm.ledger import Key
from weft.inspection.annotations import Annotation
from weft.inspection.parameter_cut import Cut, share
from weft.models.experts import StackedExperts
from weft.parallel.expert.dispatch import Compute, compute_on_owners
from weft.parallel.expert.duplicates import compute_own_rows, own_ends
from weft.parallel.expert.interface import compute_interface, is_interface, refuse_interface
from weft.plan import Plan
from weft.profiling import Block, Profile
from weft.sharding.layout import COMPUTE_DTYPE

COUNT_BYTES = 8  # of the number of rows for one expert
KEY: Key = ("expert", "all_to_all")
GATHER_KEY: Key = ("x", "all_gather")
_NUM_EXPERTS = Annotation[int]("num_experts")  # of all ranks, on a layer whose experts are on several
_ROWS_OVER = Annotation[Axis]("rows_over")  # x, on a layer of whose rows each rank of x sends a part


def expert_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules whose parameters are stacked by expert, by name: weft's own and those of transformers."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, StackedExperts) or is_interface(module)
    }


def refuse_layer(name: str, layer: nn.Module) -> str | None:
    """Returns why weft cannot compute a layer with its experts on several ranks; None if it can."""
    return None if isinstance(layer, StackedExperts) else refuse_interface(name, layer)


def distribute(layer: Any, num_experts: int, axis: Axis, x: Axis | None) -> None:
    """Replace a layer's forward by one that computes with the experts of all ranks of the axis.

    With `x`, each rank of x sends a part of the rows.
    """
    _NUM_EXPERTS.set(layer, num_experts)
    if x is not None:
        _ROWS_OVER.set(layer, x)

    def everywhere(own: Compute) -> Compute:
        whole = partial(compute_on_owners, own, axis, num_experts)
        return whole if x is None else partial(compute_own_rows, whole, x, num_experts)

    is_ours = isinstance(layer, StackedExperts)
    interface = partial(compute_interface, layer, num_experts, everywhere)
    layer.forward = everywhere(layer.forward) if is_ours else interface


def num_experts_of(layer: nn.Module) -> int:
    """Returns the number of experts of a layer on this rank."""
    return next(layer.parameters()).shape[0]


def distributed_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the layers whose experts are on several ranks, by name."""
    return {name: module for name, module in model.named_modules() if _NUM_EXPERTS.get(module) is not None}


def routed_counts(layer: nn.Module, rows: Tensor, chosen: Tensor | None, *_: Any) -> Tensor | None:
    """Returns how many rows this rank sends to each expert of all ranks in a call of a distributed layer [experts].

    `chosen` says before which row each expert ends or, for transformers' layers, the experts of each token. It is None,
    and so is the result, if all experts have equally many rows.
    """
    if chosen is None:
        return None
    ends, x = chosen.long(), _ROWS_OVER.get(layer)
    if not isinstance(layer, StackedExperts):
        ends = chosen.flatten().bincount(minlength=_NUM_EXPERTS.get(layer) or 0).cumsum(0)
    ends = ends if x is None else own_ends(ends, x)
    return ends.diff(prepend=ends.new_zeros(1))


def expert_cuts(model: nn.Module, shapes: Mapping[str, tuple[int, ...]], plan: Plan, index: int) -> dict[str, Cut]:
    """Returns, by name, the part of every parameter of global shape that rank `index` of the axis holds.

    Gradients of all but experts are partial sums over the axis, because ranks have different samples. Those of experts
    are partial sums over x if its ranks send different rows.
    """
    inside, degree = tuple(f"{name}." for name in expert_layers(model)), plan.expert
    sums = ("x",) if plan.tensor.drop_duplicates else ()

    def cut(name: str, shape: tuple[int, ...]) -> Cut:
        whole = Cut.whole(shape)
        if name.startswith(inside):
            return Cut(shape, ((share(shape[0], degree, index),), *whole.intervals[1:]), sums=sums)
        return Cut(shape, whole.intervals, degree, ("expert",), index == 0)

    return {name: cut(name, shape) for name, shape in shapes.items()}


@dataclass(frozen=True)
class ExpertTraffic:
    """The all-to-alls of one layer in one micro-batch. A rank's tokens have `num_rows` rows of `row_bytes`.

    `is_even`: all experts have equally many rows, so no counts are sent. Forward runs `num_forwards` times.
    `has_row_gradient`, `has_result_gradient`: gradients of the rows, and of the experts' results, are sent in backward.
    `num_parts` ranks of x each send a part of the rows, and gather the results, and in backward the rows' gradients.
    """

    name: str
    num_experts: int
    is_even: bool
    num_rows: int
    row_bytes: int
    num_forwards: int
    has_row_gradient: bool
    has_result_gradient: bool
    num_parts: int = 1

    def calls(self, num_arrived: int) -> Iterator[tuple[Key, int]]:
        """Yields each all-to-all with its bytes, if `num_arrived` rows arrive at this rank."""
        if not self.is_even:
            yield from [(KEY, COUNT_BYTES * self.num_experts)] * self.num_forwards
        yield from [(KEY, self.num_rows * self.row_bytes)] * (self.num_forwards + self.has_result_gradient)
        yield from [(KEY, num_arrived * self.row_bytes)] * self.num_sends_of_arrived
        if self.num_parts > 1:
            yield from [(GATHER_KEY, self.num_parts * self.num_rows * self.row_bytes)] * self.num_sends_of_arrived

    @property
    def num_sends_of_arrived(self) -> int:
        """How often as many rows are sent as arrived: the results, and the gradients of the rows."""
        return self.num_forwards + self.has_row_gradient


def layer_traffics(profile: Profile, plan: Plan) -> Iterator[ExpertTraffic]:
    """Yields the traffic of every layer of experts in a rank's profile of one micro-batch."""
    assert profile.model is not None
    layers = expert_layers(profile.model)
    for block in profile.blocks:
        for experts in block.experts:
            if experts.name in layers and experts.per_token is not None:
                hidden = _hidden_size(block, experts.name)
                split_over = plan.tensor.x if plan.tensor.sequence else 1
                tokens = profile.stream_numel // hidden // split_over
                batch = profile.stream_shape[0] if profile.stream_shape else 1
                is_again = plan.memory.recompute != "none" and block.in_backward
                has_row_gradient = block.in_backward and _is_differentiated(profile, block, experts.name)
                num_parts = plan.tensor.x if plan.tensor.drop_duplicates else 1
                yield ExpertTraffic(
                    experts.name,
                    experts.num_experts,
                    experts.capacity is not None,
                    experts.num_rows(batch, tokens // batch) // num_parts * block.calls,
                    hidden * COMPUTE_DTYPE[plan.precision].itemsize,
                    2 if is_again else 1,
                    has_row_gradient,
                    has_row_gradient or (block.in_backward and _is_trained(block, f"{experts.name}.")),
                    num_parts,
                )


def _hidden_size(block: Block, name: str) -> int:
    """Returns the features of a token in the layer of experts: those of the results of `down_proj`."""
    return next(p.shape[1] for p in block.parameters if p.name == f"{name}.down_proj")


def _is_differentiated(profile: Profile, block: Block, name: str) -> bool:
    """Do the tokens that enter the layer require gradients? Some parameter before it, or the block's input, does."""
    parent = f"{name.rpartition('.')[0]}."
    before = [p.trainable for p in block.parameters if not p.name.startswith(parent)]
    layers = (layer.needs_gradient for key, layer in profile.layers.items() if key.startswith(f"{block.name}."))
    return any(before) or next(layers, True)


def _is_trained(block: Block, inside: str) -> bool:
    return any(p.trainable for p in block.parameters if p.name.startswith(inside))
