"""The interface of every axis and every memory policy. A new one is a file with a `Strategy` and a line in the table.

`refuse` states in words why a plan does not fit a model, `cost` predicts communication and memory, and `apply` changes
the model; `parallel/apply.py` has the order of all. `block_calls` and `buffer_calls` are the collectives of an axis,
which the planner times. They are methods of one class so that they stay consistent. A test compares the traffic that
`cost` predicts with the ledger, to the byte, and others compare the planner's calls with `cost`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from weft.comm import Traffic, Traffics, add_traffic
from weft.comm.ledger import Key
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.profiling.software import BlockPass, Software
from weft.profiling.workload import Call

Values = Callable[[str], Tensor]


@dataclass(frozen=True)
class Transient:
    """Memory that is allocated and freed within a step, by phase.

    `step_bytes` exist during the whole step. `loss_bytes` exist at the loss, after the last forward, and
    `backward_bytes` in the backward of a block, both in addition to all saved activations. `backward_bytes` may be
    negative, because the activations that the loss saved are freed by then.
    """

    step_bytes: int = 0
    loss_bytes: int = 0
    backward_bytes: int = 0

    def __add__(self, other: Transient) -> Transient:
        return Transient(
            self.step_bytes + other.step_bytes,
            self.loss_bytes + other.loss_bytes,
            self.backward_bytes + other.backward_bytes,
        )


@dataclass(frozen=True)
class Cost:
    """Communication, memory and FLOPs of one rank in one step.

    `state_bytes`: memory that persists between steps, by kind. `transient`: memory within a step. `saved_bytes`: the
    activations that one micro-batch saves for backward. `flops`: those of forward, backward and recompute.
    `host_bytes`: state in host memory, by kind.
    """

    traffic: Traffics = field(default_factory=dict)
    state_bytes: Mapping[str, int] = field(default_factory=dict)
    transient: Transient = field(default_factory=Transient)
    saved_bytes: int = 0
    flops: int = 0
    host_bytes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            add_traffic(self.traffic, other.traffic),
            _add(self.state_bytes, other.state_bytes),
            self.transient + other.transient,
            self.saved_bytes + other.saved_bytes,
            self.flops + other.flops,
            _add(self.host_bytes, other.host_bytes),
        )

    @property
    def memory_bytes(self) -> int:
        """The predicted peak memory of a rank."""
        at_most = self.saved_bytes + max(self.transient.loss_bytes, self.transient.backward_bytes)
        return sum(self.state_bytes.values()) + self.transient.step_bytes + max(0, at_most)

    @property
    def transient_bytes(self) -> int:
        """The peak minus state and saved activations; negative if some of these are freed before the peak."""
        return self.memory_bytes - sum(self.state_bytes.values()) - self.saved_bytes


class SearchSpace(NamedTuple):
    """What a search for plans divides: the devices that are left, and samples. `asked` are fields that it must keep.

    `num_experts` is the largest number that divides the experts of every layer; 1 if the model has none. `plan` has the
    settings of the strategies before this one, with which some of its own may not go.
    """

    num_devices: int
    samples: Literal["sequences", "images"]
    sequence: int = 1
    asked: frozenset[str] = frozenset()
    num_experts: int = 1
    plan: Plan = Plan()


class Buffer(NamedTuple):
    """A flat buffer of `numel` parameters, with the bytes of an element that is gathered and of a reduced gradient.

    `expert_numel` of them are experts, which each rank of `expert` holds others of.
    """

    numel: float
    compute_bytes: int
    gradient_bytes: int
    expert_numel: float = 0


def _add(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {kind: one.get(kind, 0) + other.get(kind, 0) for kind in {**one, **other}}


class Strategy:
    """One axis, or one memory policy. Defaults: fits every model, costs nothing, does nothing."""

    name: str
    exact = True
    axes: tuple[str, ...] = ()  # of the mesh, over which this strategy alone decides

    def needs_example(self, plan: Plan) -> bool:
        """Must a model be profiled with an example of its arguments, under a plan?"""
        return False

    def prepare(self, model: nn.Module, plan: Plan) -> None:
        """Change the whole model, before it is profiled."""

    def examine(self, whole: Profile, plan: Plan, mesh: Mesh) -> None:
        """Keep with the whole model what `apply` must know of it, before it is cut into stages or split."""

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        """Why this plan does not fit this model, with the values and what to change; None where it does."""
        return None

    def localise(self, profile: Profile, plan: Plan, coordinates: Mapping[str, int]) -> Profile:
        """The part of a profile that the rank at `coordinates` of the mesh computes and holds under this axis."""
        return profile

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        """What the rank at `coordinates` of the mesh pays for a step. The profile is its part, of one micro-batch."""
        return Cost()

    def assumptions(self, profile: Profile, plan: Plan) -> tuple[str, ...]:
        """What `localise` and `cost` assume about the whole model because it could not be measured, as sentences."""
        return ()

    def settings(self, space: SearchSpace) -> Iterable[Mapping[str, Any]]:
        """The fields of a plan that a search tries for this axis; nothing but {} leaves the axis out."""
        return ({},)

    def block_calls(self, block: BlockPass, plan: Plan) -> Iterable[Call]:
        """The collectives of one micro-batch in one block. `cost` counts them layer by layer."""
        return ()

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        """The collectives over the parameters and the gradients of one flat buffer. `cost` counts them for each."""
        return ()

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        """Change the model, or the model of a pipeline's stage, in place; state_dict keys stay. `values` gives a
        parameter's initial value by name.
        """
        return model


def tally(pairs: Iterable[tuple[Key, int]]) -> dict[Key, Traffic]:
    """Sums calls, ((axis, operation), bytes of one call), to the traffic of each axis and operation."""
    return add_traffic(*({key: Traffic(1, num_bytes)} for key, num_bytes in pairs))


def refuse_batch_mixers(profile: Profile, plan: Plan, axis: str, degree: int) -> str | None:
    """Returns why layers that mix the samples of a batch do not allow an axis that splits the batch; None if they do.

    They would compute something else if each rank has its own part of the batch.
    """
    if degree > 1 and plan.exact and profile.batch_mixers and plan.statistics == "rank":
        return (
            f"layer '{profile.batch_mixers[0]}' takes statistics over the batch, which {axis} = {degree} splits; "
            f"set plan.statistics = 'batch' to take them over all ranks, plan.exact = false to accept those of each "
            f"rank, or use GroupNorm or LayerNorm"
        )
    return None


def uncounted_traffic(given: str, source: str, remedy: str) -> PlanError:
    """Returns the error for a model whose traffic cannot be predicted. `source` is what the traffic follows from."""
    return PlanError(
        f"the traffic of {given} follows from {source}, and that of this model depends on values, so it cannot be "
        f"counted; use {remedy}"
    )


@lru_cache(maxsize=1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    """The divisors of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def reductions_per_step(plan: Plan, split: BatchSplit) -> int:
    """Returns how often gradients are reduced in a step."""
    return split.accumulation if plan.memory.accumulate == "slice" else 1
