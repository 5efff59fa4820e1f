"""Axis `shard`: the batch and the model's state split over ranks.

ZeRO (Rajbhandari et al. 2020), FSDP (Zhao et al. 2023), and the depth axis of AxoNN's three-dimensional matmul.

Each block's parameters lie in one flat buffer, cut into equal slices (`sharding/layout.py`). A rank's optimizer updates
its slice only. A step communicates, for a buffer of N elements with c bytes in the compute dtype and m bytes of master
state:

    stage   all-gather of N·c                    reduce-scatter of N·m    state between steps
    1, 2    once, before forward (*)             once, after backward     whole parameters + slice
    3       before each forward and backward     once, after backward     slice only
            of each micro-batch (the root once
            for both; in a pipeline, for the step)

Stage 1 keeps the whole gradient buffer, stages 2 and 3 only the slice. `memory.accumulate = "slice"` reduces after
every micro-batch, so that no whole gradients exist in between. (*) Stage 2 then also gathers before each micro-batch,
because an update may follow any reduction. Degree 1 is plain data parallelism or mixed precision: the same code without
gathers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from weft.cluster.wire_formats import message_bytes
from weft.comm.ledger import Key
from weft.inspection.model_tensors import allocate
from weft.launch.environment import current_store
from weft.mesh import Mesh
from weft.parallel.buffer_traffic import buffer_traffic
from weft.plan import BatchSplit, Plan
from weft.profiling import Block, ParameterUses, Profile, profile
from weft.profiling.software import Software
from weft.profiling.workload import Call
from weft.sharding.flat_buffer import Flat, FlatOptions
from weft.sharding.host_memory import check_memory_fits
from weft.sharding.layout import (
    COMPUTE_DTYPE,
    MASTER_DTYPE,
    NUM_DEVICE_BUFFERS,
    STAGING,
    STAGING_SLOTS,
    STEP_COUNTER_BYTES,
    DeviceBufferKey,
    FlatLayout,
    device_buffer_sizes,
    flat_layouts,
    gradient_dtype,
    has_separate_slice,
    host_buffers,
    master_bytes,
    moment_dtype,
    needs_units,
    optimizer_bytes,
    slice_dtype,
    slot_shapes,
    streamed_blocks,
    streamed_slot_shapes,
    trained_layouts,
)
from weft.sharding.streamed_buffer import DeviceBuffer, StreamedFlat, make_device_buffers
from weft.sharding.units import make_units
from weft.sharding.way_agreement import WayAgreement
from weft.strategy import Buffer, Cost, Strategy, Transient, Values, reductions_per_step, refuse_batch_mixers, tally

_ONE = BatchSplit(1, 1, 1, 1, 1)  # one micro-batch


class ShardAxis(Strategy):
    """Splits the model's state and the batch over `shard`."""

    name = "shard"

    def refuse(self, profile: Profile, plan: Plan) -> str | None:
        if plan.shard.degree > 1 and not profile.num_trained:
            return "the model has no trainable parameter; set requires_grad on what is to be trained"
        reason = refuse_batch_mixers(profile, plan, "shard", plan.shard.degree) or _refuse_renormalising(profile, plan)
        return reason or _refuse_rounded(plan)

    def cost(self, profile: Profile, plan: Plan, split: BatchSplit, coordinates: Mapping[str, int]) -> Cost:
        if not needs_units(plan):
            return _unsplit_cost(profile, plan)
        pairs: list[tuple[Key, int]] = [*_sums(profile, plan, split)]
        pairs += buffer_traffic(self, profile, plan, split)
        state, hosted = _state_bytes(profile, plan, split, coordinates["shard"])
        return Cost(tally(pairs), state, _transient(profile, plan, split), host_bytes=hosted)

    def buffer_calls(self, buffer: Buffer, plan: Plan, software: Software) -> Iterable[Call]:
        if plan.shard.degree == 1:
            return
        if software.shards_over_expert:
            yield from _calls_over_expert(buffer)
            return
        degree, rounded = plan.shard.degree, plan.communication
        own = buffer.numel / degree
        if rounded.scatter == "exact":
            yield Call("shard", "reduce_scatter", buffer.numel * buffer.gradient_bytes, "reduce")
        else:
            yield Call("shard", "all_to_all", degree * message_bytes(own, rounded.scatter), "reduce")
        num_bytes: float = buffer.numel * buffer.compute_bytes
        if rounded.gather != "exact":
            num_bytes = degree * message_bytes(own, rounded.gather)
        gather = Call("shard", "all_gather", num_bytes, "reduce")
        if plan.shard.stage < 3:
            yield gather
            return
        yield gather._replace(phase="forward")
        yield gather._replace(phase="backward")
        if software.gathers_again and plan.memory.recompute == "full":
            yield gather._replace(phase="recompute")

    def apply(self, model: nn.Module, plan: Plan, mesh: Mesh, values: Values) -> nn.Module:
        master = MASTER_DTYPE[plan.precision]
        if not needs_units(plan):
            return _hold_unsplit(model, values, master, mesh.device)
        structure = profile(model)
        state, hosted = _state_bytes(structure, plan, _ONE, mesh.coordinates["shard"])
        check_memory_fits(sum(hosted.values()), sum(state.values()), mesh.device, mesh.num_local_ranks)
        away, streamed = host_buffers(structure.all, plan), streamed_blocks(structure.all, plan)
        device_buffers = make_device_buffers(
            device_buffer_sizes(structure.all, plan), COMPUTE_DTYPE[plan.precision], mesh.device
        )
        make_flats = partial(
            _make_flats,
            plan=plan,
            mesh=mesh,
            values=values,
            away=away,
            streamed=streamed,
            device_buffers=device_buffers,
        )
        units = make_units(model, make_flats, COMPUTE_DTYPE[plan.precision])
        units.status = mesh.ledger.status
        # A proof compares all calls (`ledger.order`), and the stages of a pipeline follow a trace.
        if plan.shard.degree > 1 and plan.shard.stage == 3 and plan.pipe.degree == 1 and mesh.ledger.order is None:
            names = [unit.name for unit in units.blocks]
            units.way = WayAgreement(current_store(), mesh.rank, mesh.global_ranks("shard"), names)
        for buffer_owner in model.modules():
            for name, buffer in buffer_owner._buffers.items():
                if buffer is not None:
                    buffer_owner._buffers[name] = buffer.to(mesh.device)
        return model


def _calls_over_expert(buffer: Buffer) -> Iterator[Call]:
    """Calls of software that cuts experts over `shard`, and all else over `expert` and `shard`."""
    for axis, numel in (("shard", buffer.expert_numel), ("expert and shard", buffer.numel - buffer.expert_numel)):
        yield Call(axis, "all_gather", numel * buffer.compute_bytes, "forward")
        yield Call(axis, "all_gather", numel * buffer.compute_bytes, "backward")
        yield Call(axis, "reduce_scatter", numel * buffer.gradient_bytes, "reduce")


def _refuse_rounded(plan: Plan) -> str | None:
    """Returns why parameters or gradients cannot be rounded for links; None if they can, or are not."""
    rounded, shard = plan.communication, plan.shard
    if rounded.gather != "exact" and (shard.degree == 1 or shard.stage != 3):
        return (
            f"plan.communication.gather = '{rounded.gather}' rounds the parameters that shard stage 3 gathers, and "
            f"shard has degree {shard.degree} and stage {shard.stage}; use stage 3 over several ranks, or leave it out"
        )
    if rounded.scatter != "exact" and shard.degree == 1:
        return (
            f"plan.communication.scatter = '{rounded.scatter}' rounds gradients that are sent over shard, and "
            f"plan.shard = 1; leave it out, or set plan.shard"
        )
    if rounded.reduce != "exact" and plan.data == 1:
        return (
            f"plan.communication.reduce = '{rounded.reduce}' rounds gradients that are sent over data, and plan.data = "
            f"1; leave it out, or set plan.data"
        )
    return None


def _refuse_renormalising(profile: Profile, plan: Plan) -> str | None:
    """Returns why embeddings that change their weights in forward (`max_norm`) do not fit; None if they do."""
    num_token_ranks = plan.num_batch_ranks * plan.context.degree
    if not needs_units(plan) or profile.model is None:
        return None
    streamed = tuple(f"{block}." for block in streamed_blocks(profile.all, plan))
    for name, module in profile.model.named_modules():
        if not isinstance(module, (nn.Embedding, nn.EmbeddingBag)) or module.max_norm is None:
            continue
        if num_token_ranks > 1:
            return (
                f"the embedding '{name}' has max_norm, which changes the rows of a rank's own tokens in forward, and "
                f"{num_token_ranks} ranks (data × shard × context) have different tokens; normalise its result instead"
            )
        if module.weight.requires_grad and (has_separate_slice(plan) or f"{name}.".startswith(streamed)):
            return (
                f"the embedding '{name}' has max_norm, which changes its weights in forward, and with precision = "
                f"'{plan.precision}' and memory.weights = {plan.memory.weights:g} forward has a copy of those that "
                f"the optimizer updates, which would lose the change; normalise its result instead"
            )
    return None


def _sums(profile: Profile, plan: Plan, split: BatchSplit) -> Iterator[tuple[Key, int]]:
    """Yields the all-reduces of slices whose gradients are partial sums over another axis, such as x."""
    for layout in trained_layouts(profile, plan):
        for axis in layout.sums:
            one = ((axis, "all_reduce"), layout.slice_numel * master_bytes(plan))
            yield from [one] * reductions_per_step(plan, split)


def _state_bytes(profile: Profile, plan: Plan, split: BatchSplit, index: int) -> tuple[dict[str, int], dict[str, int]]:
    """Returns the bytes of a rank's state by kind: (on the device, on the host)."""
    compute, at_rest = COMPUTE_DTYPE[plan.precision].itemsize, slice_dtype(plan).itemsize
    gradient = gradient_dtype(plan, split.accumulation).itemsize
    keeps_whole = plan.shard.stage < 3 or plan.shard.degree == 1
    keeps_whole_gradient = plan.shard.stage == 1 or plan.shard.degree == 1
    device, hosted = Counter[str](parameters=0, gradients=0, optimizer=0), Counter[str]()
    away, streamed, largest = host_buffers(profile.all, plan), streamed_blocks(profile.all, plan), 0
    for block in profile.all:
        for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree)):
            is_away = (block.name, number) in away
            largest = max(largest, is_away * layout.slice_numel)
            if block.name in streamed:
                hosted.update(_streamed_bytes(layout, plan, gradient))
                continue
            home = hosted if is_away else device
            device["parameters"] += layout.numel * compute * keeps_whole
            if has_separate_slice(plan):
                home["parameters"] += layout.slice_numel * at_rest
            if layout.parameters[0].trainable:
                device["gradients"] += (layout.numel if keeps_whole_gradient else layout.slice_numel) * gradient
                home["optimizer"] += optimizer_bytes(layout, index, plan)
                if plan.memory.delay:  # the delayed gradient, and the weights after its update
                    device["gradients"] += layout.slice_numel * gradient
                    device["parameters"] += layout.slice_numel * compute
    if away:
        weight = slice_dtype(plan) if has_separate_slice(plan) or streamed else None
        moment = moment_dtype(plan.memory.state, MASTER_DTYPE[plan.precision])
        shapes = slot_shapes(largest, weight, moment)
        if streamed:
            computes, master = COMPUTE_DTYPE[plan.precision], MASTER_DTYPE[plan.precision]
            shapes += streamed_slot_shapes(largest, slice_dtype(plan), computes, master)
        device[STAGING] = STAGING_SLOTS * sum(numel * dtype.itemsize for numel, dtype in shapes)
    for size in device_buffer_sizes(profile.all, plan).values():
        device["parameters"] += size.numel * compute
        device["gradients"] += size.trained_numel * gradient
    return {**device, "buffers": profile.buffer_bytes}, dict(hosted)


def _streamed_bytes(layout: FlatLayout, plan: Plan, gradient_bytes: int) -> dict[str, int]:
    """Returns the bytes that a streamed buffer holds on the host, by kind."""
    weights = {COMPUTE_DTYPE[plan.precision], slice_dtype(plan)}
    found = {"parameters": layout.numel * sum(dtype.itemsize for dtype in weights)}
    if layout.parameters[0].trainable:
        found |= {"gradients": layout.numel * gradient_bytes, "optimizer": optimizer_bytes(layout, 0, plan)}
    return found


def _transient(profile: Profile, plan: Plan, split: BatchSplit) -> Transient:
    """Returns the memory that is held only during a step: gathered parameters (stage 3), whole gradients (2 and 3).

    Stage 3 holds the gathered root, and in backward two gathered blocks. With one micro-batch, whole gradients exist
    for the root and one block at a time, and for a second block while its gradient is reduced; by then the activations
    of the first are freed. With several micro-batches, the whole gradients of all blocks accumulate.
    """
    compute, master = COMPUTE_DTYPE[plan.precision].itemsize, master_bytes(plan)
    degree, stage = plan.shard.degree, plan.shard.stage
    if degree == 1 or stage == 1:
        return Transient()
    whole = [sum(lay.numel for lay in flat_layouts(block.parameters, degree)) for block in profile.all]
    trained = [
        sum(lay.numel for lay in flat_layouts(block.parameters, degree) if lay.parameters[0].trainable) * master
        for block in profile.all
    ]
    step = backward = 0
    if stage == 3:
        step, backward = whole[0] * compute, sum(sorted(whole[1:], reverse=True)[:2]) * compute
    if plan.pipe.degree > 1 or (split.accumulation > 1 and plan.memory.accumulate == "whole"):
        return Transient(step + sum(trained), 0, backward)
    blocks = sorted(trained[1:], reverse=True)
    saved = max(((block.saved_bytes or {}).get(plan.memory.recompute, 0) for block in profile.blocks), default=0)
    under_way = max(sum(blocks[:1]), sum(blocks[:2]) - saved)
    return Transient(step, 0, backward + trained[0] + under_way)


def _unsplit_cost(profile: Profile, plan: Plan) -> Cost:
    """Returns the cost of one rank without flat buffers.

    Gradients exist from backward to the update: none at the loss, and those of the root and one block at the peak of
    backward.
    """
    trained = [p for block in profile.all for p in block.parameters if p.trainable]
    size, trained_numel = master_bytes(plan), sum(parameter.numel for parameter in trained)
    first = max((block.numel for block in profile.blocks), default=0)  # a block, as large as the largest
    backward = min(trained_numel, profile.root.numel + first)
    return Cost(
        state_bytes={
            "parameters": profile.numel * size,
            "gradients": trained_numel * size,
            "optimizer": 2 * trained_numel * size + STEP_COUNTER_BYTES * len(trained),
            "buffers": profile.buffer_bytes,
        },
        transient=Transient(0, -trained_numel * size, (backward - trained_numel) * size),
    )


def _make_flats(
    block: Block,
    places: Mapping[str, ParameterUses],
    plan: Plan,
    mesh: Mesh,
    values: Values,
    away: frozenset[tuple[str, int]],
    streamed: Mapping[str, int],
    device_buffers: Mapping[DeviceBufferKey, DeviceBuffer],
) -> Sequence[Flat]:
    flats: list[Flat] = []
    for number, layout in enumerate(flat_layouts(block.parameters, plan.shard.degree)):
        options = FlatOptions(
            plan.shard.stage,
            COMPUTE_DTYPE[plan.precision],
            MASTER_DTYPE[plan.precision],
            slice_dtype(plan),
            plan.memory.state,
            is_alone=plan.num_ranks == 1,
            on_host=(block.name, number) in away,
            delays=plan.memory.delay,
            communication=plan.communication,
            num_sending_ranks=plan.expert * (plan.branch.degree if plan.branch.splits_batch else 1),
        )
        make: Callable[..., Flat] = Flat
        if block.name in streamed:
            make = partial(StreamedFlat, device_buffers[number, streamed[block.name] % NUM_DEVICE_BUFFERS])
        owners = [places[parameter.name] for parameter in layout.parameters]
        flats.append(make(layout, owners, values, mesh["shard"], mesh.device, options=options))
        flats[-1].sum_over += [mesh.part(name) for name in layout.sums]
    return flats


def _hold_unsplit(model: nn.Module, values: Values, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Set up the model of a single rank with a single precision: move it to the device, without flat buffers."""
    if any(parameter.is_meta for parameter in model.parameters()):
        allocate(model, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(values(name))
    return model.to(device=device, dtype=dtype)
