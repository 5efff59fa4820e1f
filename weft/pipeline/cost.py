"""The cost of a pipeline on one rank: that of its stages, of messages, and of shared parameters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from weft.comm.ledger import Key
from weft.models.loss_head import is_loss_head
from weft.pipeline.build import Staging
from weft.pipeline.shadow_gradients import VERSION_BYTES
from weft.pipeline.shared_parameters import running_statistics
from weft.plan import BatchSplit, Plan
from weft.profiling import Profile
from weft.schedule.actions import Message, Schedule
from weft.schedule.activation_lifetimes import StageBytes, peak_held_bytes
from weft.schedule.simulate import simulate
from weft.sharding.layout import COMPUTE_DTYPE, STAGING, master_bytes, trained_layouts
from weft.strategy import Cost, Transient, tally

Localise = Callable[[Profile, Plan], Profile]
StageCost = Callable[[Profile, BatchSplit, Plan], Cost]


def pipeline_cost(
    whole: Profile,
    staging: Staging,
    plan: Plan,
    split: BatchSplit,
    coordinates: Mapping[str, int],
    localise: Localise,
    stage_cost: StageCost,
) -> Cost:
    """Return the cost of the rank's stages, each with its micro-batches. Saved bytes are the most alive at once."""
    schedule, index = staging.schedule(split.accumulation), coordinates["pipe"]
    total, step_bytes = Cost(tally(_messages(staging, schedule, coordinates))), 0
    pairs: list[tuple[Key, int]] = []
    stages: dict[int, StageBytes] = {}
    slots = 0
    for stage, replica in staging.held_by(index):
        part = localise(staging.profile(whole, stage, coordinates), plan.of_stage(stage))
        steps = schedule.compute(schedule.rank_of(stage, replica))
        count = sum((step.kind, step.stage, step.replica) == ("forward", stage, replica) for step in steps)
        own = stage_cost(part, replace(split, accumulation=count), plan.of_stage(stage))
        stages[stage] = _stage_bytes(own, part, plan)
        step_bytes += own.transient.step_bytes
        slots = max(slots, own.state_bytes.get(STAGING, 0))
        total += replace(own, saved_bytes=0, transient=Transient())
        pairs += _copies(staging, part, plan, stage, replica)
    beside = staging.shadow_of(index)
    if beside is not None:  # its state, its forwards and all that they save
        part = localise(staging.profile(whole, beside, coordinates), plan.of_stage(beside))
        own = stage_cost(part, split, plan.of_stage(beside))
        stages[beside] = _stage_bytes(own, part, plan)
        step_bytes += own.transient.step_bytes
        total += replace(own, saved_bytes=0, transient=Transient(), flops=part.flops * split.accumulation)
    if plan.pipe.shadow and index > 0:
        part = localise(staging.profile(whole, index, coordinates), plan.of_stage(index))
        sizes = [layout.slice_numel * master_bytes(plan) for layout in trained_layouts(part, plan)]
        pairs += [(("shadow", "send"), size) for size in (VERSION_BYTES, *sizes)]
    if slots:  # all stages of a rank share one set of slots, as large as the largest stage needs
        total = replace(total, state_bytes={**total.state_bytes, STAGING: slots})
    saved = [float(stages[stage].saved_bytes) if stage in stages else 0.0 for stage in range(staging.num_stages)]
    alive = int(simulate(schedule, activation_bytes=saved).peak_activation_bytes[index])
    more = peak_held_bytes(schedule, index, stages, edge_bytes(staging, coordinates)) - alive
    return total + Cost(tally(pairs), transient=Transient(step_bytes, more, more), saved_bytes=alive)


def _stage_bytes(own: Cost, part: Profile, plan: Plan) -> StageBytes:
    """Return the bytes of one micro-batch at a stage.

    Deferred weight gradients need the input and the output gradient of every linear. Those of linears after the last
    block, and of the last block's last linear, already exist when that block's backward reaches its peak. A head that
    computes the loss defers nothing.
    """
    peak = max(own.transient.loss_bytes, own.transient.backward_bytes)
    if plan.pipe.schedule != "zero-bubble":
        return StageBytes(own.saved_bytes, peak, 0)
    itemsize = COMPUTE_DTYPE[plan.precision].itemsize
    linears = [(name, layer) for name, layer in part.layers.items() if layer.is_linear and not _is_loss(part, name)]
    sizes = [layer.rows * layer.out_features * itemsize + layer.saved_bytes for _, layer in linears]
    in_blocks = [
        number
        for number, (name, _) in enumerate(linears)
        if name.startswith(tuple(f"{block.name}." for block in part.blocks))
    ]
    return StageBytes(own.saved_bytes, peak + sum(sizes[max(in_blocks, default=0) :]), sum(sizes))


def _is_loss(part: Profile, name: str) -> bool:
    return part.model is not None and is_loss_head(part.model.get_submodule(name))


def edge_bytes(staging: Staging, coordinates: Mapping[str, int] | None = None) -> list[int]:
    """Return the bytes of a message over each edge between stages, at a tile (the first if `coordinates` is None)."""
    route = staging.route_at(coordinates)
    values = route.trace.values
    return [values[number].num_bytes // staging.plan.context.degree for number in route.edge_numbers]


def _messages(staging: Staging, schedule: Schedule, coordinates: Mapping[str, int]) -> list[tuple[Key, int]]:
    sizes = edge_bytes(staging, coordinates)
    sent = [step for step in schedule.lists[coordinates["pipe"]] if isinstance(step, Message) and step.is_send]
    return [(("pipe", "send"), sizes[message.edge]) for message in sent]


def _copies(staging: Staging, part: Profile, plan: Plan, stage: int, replica: int) -> list[tuple[Key, int]]:
    """Return the reductions of a stage's shared parameters: gradients, and statistics of BatchNorm.

    A rank that holds several copies reduces once for all of them.
    """
    pairs: list[tuple[Key, int]] = []
    is_mirrored, ranks = len(staging.placement) > 1, staging.placement[replica]
    for layout in trained_layouts(part, plan):
        num_bytes = layout.slice_numel * master_bytes(plan)
        if is_mirrored:
            pairs.append((("mirror", "all_reduce"), num_bytes))
        holders = [ranks[number] for number in layout.stages]
        if len(set(holders)) > 1 and layout.stages[holders.index(ranks[stage])] == stage:
            pairs.append((("tied", "all_reduce"), num_bytes))
    if is_mirrored and part.model is not None:
        pairs += [
            (("mirror", "all_reduce"), buffer.numel() * buffer.element_size())
            for buffer in running_statistics(part.model)
        ]
    return pairs
