"""Rules that the fields of a plan must keep among each other. A plan that breaks one raises a PlanError in words."""

from __future__ import annotations

from typing import Protocol

from weft.cluster.communication import Communication
from weft.errors import PlanError
from weft.plan.tables import HOST_SHARES, Memory, Pipe, Shard, Tensor


class PlanFields(Protocol):
    """What the rules read of a plan."""

    @property
    def pipe(self) -> Pipe: ...
    @property
    def shard(self) -> Shard: ...
    @property
    def tensor(self) -> Tensor: ...
    @property
    def memory(self) -> Memory: ...
    @property
    def expert_over(self) -> tuple[str, ...]: ...
    @property
    def precision(self) -> str: ...
    @property
    def exact(self) -> bool: ...
    @property
    def is_viewed(self) -> bool: ...
    @property
    def data(self) -> int: ...
    @property
    def degrees(self) -> dict[str, int]: ...
    @property
    def hierarchical(self) -> bool: ...
    @property
    def communication(self) -> Communication: ...
    @property
    def ranks_per_device(self) -> int: ...


def check_plan(plan: PlanFields) -> None:
    """Check all rules."""
    check_bits(plan)
    check_sequence(plan)
    if plan.memory.recompute_stages is not None:
        check_recompute_stages(plan, plan.memory.recompute_stages)
    check_folding(plan)
    check_kept(plan)
    if plan.ranks_per_device != 1:
        check_ranks_per_device(plan)


def check_bits(plan: PlanFields) -> None:
    """Check what is kept of weights and moments, in which bits and where."""
    memory = plan.memory
    if memory.delay:
        check_delay(plan)
    for name in HOST_SHARES:
        share = getattr(memory, name)
        if not 0 <= share <= 1:
            raise PlanError(f"plan.memory.{name} = {share}; a share lies between 0 and 1")
    if plan.exact and (not memory.master or memory.state != "master"):
        fewer = f"state = '{memory.state}'" if memory.master else "master = false"
        raise PlanError(
            f"plan.memory.{fewer} keeps less of each update than fp32 does, and plan.exact = true; set plan.exact = "
            f"false to accept it, or leave it out"
        )
    if not memory.master and plan.precision != "bf16":
        raise PlanError(
            f"plan.memory.master = false leaves out the fp32 weights of precision = 'bf16', and precision is "
            f"'{plan.precision}'; use bf16, or master = true"
        )


def check_delay(plan: PlanFields) -> None:
    """Check that updates can be applied one step late."""
    if plan.exact:
        raise PlanError(
            "plan.memory.delay = true takes gradients at weights one update old, and plan.exact = true; set "
            "plan.exact = false to accept it, or delay = false"
        )
    if not plan.memory.offload:
        raise PlanError(
            "plan.memory.delay = true hides the update of state on the host, and plan.memory.offload = 0; raise "
            "offload, or use delay = false"
        )
    if plan.memory.weights:
        raise PlanError(
            f"plan.memory.delay = true keeps the weights of two steps, and plan.memory.weights = "
            f"{plan.memory.weights:g} keeps those of one step, on the host; use weights = 0, or delay = false"
        )
    is_freed = plan.shard.degree > 1 and plan.shard.stage == 3
    if plan.precision != "bf16" or not plan.memory.master or is_freed:
        raise PlanError(
            f"plan.memory.delay = true computes with weights that the update does not change: with precision = "
            f"'bf16', memory.master = true and shard.stage below 3; given '{plan.precision}', "
            f"{str(plan.memory.master).lower()} and stage {plan.shard.stage} of degree {plan.shard.degree}"
        )


def check_sequence(plan: PlanFields) -> None:
    """Check the options of `tensor.sequence`."""
    if plan.tensor.chunks < 1:
        raise PlanError(f"plan.tensor.chunks = {plan.tensor.chunks}; it must be at least 1")
    if plan.tensor.chunks > 1 and not plan.tensor.sequence:
        raise PlanError(
            f"plan.tensor.chunks = {plan.tensor.chunks} cuts what tensor.sequence = true gathers and scatters, and "
            f"sequence is false; set sequence = true, or chunks = 1"
        )
    if plan.tensor.regather and not plan.tensor.sequence:
        raise PlanError(
            "plan.tensor.regather = true gathers again what tensor.sequence = true splits, and sequence is false; "
            "set sequence = true, or regather = false"
        )
    is_everywhere = plan.memory.recompute_stages is None
    if plan.tensor.regather and plan.memory.recompute != "none" and is_everywhere:
        raise PlanError(
            f"plan.tensor.regather = true, but memory.recompute = '{plan.memory.recompute}' already gathers the "
            f"inputs of a block's matmuls again; use regather = false"
        )


def check_recompute_stages(plan: PlanFields, count: int) -> None:
    """Check the number of stages that recompute."""
    given = f"plan.memory.recompute_stages = {count}"
    if plan.memory.recompute == "none":
        raise PlanError(
            f"{given} says which stages recompute, and memory.recompute = 'none'; set it to 'selective' or 'full', "
            f"or leave recompute_stages out"
        )
    if plan.pipe.degree == 1:
        raise PlanError(f"{given} needs a pipeline, and pipe = 1; leave it out to recompute in all blocks")
    most = plan.pipe.num_stages - 1
    if not 1 <= count <= most:
        raise PlanError(
            f"{given}, and the pipeline has {most + 1} stages (pipe.degree × chunks); use 1 to {most}, or leave it "
            f"out to recompute in all"
        )


def check_kept(plan: PlanFields) -> None:
    """Check that there are collectives of recomputed blocks whose results can be kept."""
    if plan.memory.keep_collectives and plan.memory.recompute == "none":
        raise PlanError(
            "plan.memory.keep_collectives = true keeps what recompute would communicate again, and memory.recompute = "
            "'none'; set recompute, or keep_collectives = false"
        )
    if plan.memory.keep_collectives and plan.is_viewed:
        raise PlanError(
            "plan.memory.keep_collectives = true does not keep what tiles and statistics of the whole batch "
            "communicate; use keep_collectives = false, or neither"
        )


def check_folding(plan: PlanFields) -> None:
    """Check the axes over which experts are split, too."""
    given = list(plan.expert_over)
    if len(set(given)) < len(given):
        raise PlanError(f"plan.expert_over = {given} names an axis twice; name each once")
    if "x" in given and plan.tensor.drop_duplicates:
        raise PlanError(
            f"plan.expert_over = {given} splits experts over x, whose ranks then send different tokens, and "
            f"tensor.drop_duplicates = true is for experts that x does not split; use drop_duplicates = false"
        )
    if plan.tensor.sequence and plan.tensor.drop_duplicates:
        raise PlanError(
            "plan.tensor.sequence = true gives ranks of x different tokens, so there are no duplicates for "
            "tensor.drop_duplicates = true to drop; use drop_duplicates = false"
        )


def check_ranks_per_device(plan: PlanFields) -> None:
    """Check that ranks which share a device are replicas, and fill devices."""
    given = f"plan.ranks_per_device = {plan.ranks_per_device}"
    if plan.ranks_per_device < 1:
        raise PlanError(f"{given}; a device has at least 1 rank")
    if plan.data % plan.ranks_per_device:
        raise PlanError(
            f"{given} does not divide data = {plan.data}, the number of ranks; use a multiple of it for data, or "
            f"another number of ranks per device"
        )
    split = [f"{axis} = {degree}" for axis, degree in plan.degrees.items() if degree > 1 and axis != "data"]
    if split:
        raise PlanError(
            f"{given} is for data parallelism alone: ranks of a device sum their gradients on it, and nothing else; "
            f"given {', '.join(split)}; use 1 there, or ranks_per_device = 1"
        )
    if plan.hierarchical:
        raise PlanError(
            f"{given} has two levels of its own, the ranks of a device and the devices, and plan.hierarchical = true "
            f"asks for those of nodes; use one of them"
        )
    if plan.communication.reduce != "exact":
        raise PlanError(
            f"{given} sums gradients on the device, where no link is, and plan.communication.reduce = "
            f"'{plan.communication.reduce}' rounds them for links; use 'exact', or ranks_per_device = 1"
        )
