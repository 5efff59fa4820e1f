"""What published runs hold on a device, from the same profile as weft's own memory and facts about their software.

**Megatron** (Korthikanti et al. 2022): the table's columns are sums of tensors, so they are met by counting them. State
is 18 bytes a parameter of the blocks (16-bit weight, 32-bit gradient, master weight and two moments). A block saves
what weft's profile says, and masks of dropout of one byte; attention without a fused kernel also saves 5 bytes for each
score (softmax, its mask, what is left), which selective recompute does again.

**torchtitan** prints what the allocator has reserved. Facts from its source and torch's, not re-checked:

- FSDP2 over shard × context: fp32 parameters, gradients and two moments; blocks, and the root as one more, are gathered
  in bf16; gradients are reduced in fp32. With a pipeline parameters stay gathered and whole fp32 gradients add up.
- The buffers that are gathered into, and those that are reduced from, belong to streams of their own, whose pools no
  other stream takes from: their peaks add to that of compute, whenever they are.
- Selective recompute ("op") keeps the input of a block, the result of attention and of every second matmul; compiled,
  that of the last is not needed. Full keeps the input, and with `sequence` each rank its part.
- The loss is not compiled in 2024, in 2025 it is. Bytes held for each logit: eager 14 (a 16-bit one that is freed but
  too small for any other buffer, log-probabilities, two gradients), over split classes 18 (one more: its backward adds
  an exponential to a buffer and scales the sum), compiled 4 (logits and their gradient).
- A pipeline's stage keeps buffers for all micro-batches to receive into, and results until their backward.
"""

from __future__ import annotations

import math
from dataclasses import replace

from published_tables import Case

from weft.plan import Memory, Plan
from weft.planner.closed_form_memory import sizes
from weft.planner.in_flight import alive_at_once
from weft.profiling import Profile

MEGATRON_STATE_BYTES = 18
SCORE_BYTES = 5
TITAN_STATE_BYTES = 16
EAGER_LOGIT_BYTES, SPLIT_LOGIT_BYTES, COMPILED_LOGIT_BYTES = 14, 18, 4


def predict_memory_bytes(case: Case, plan: Plan, profile: Profile) -> float:
    """What the fullest rank of a case holds; `profile` is of one sequence through two of its blocks, and no dropout."""
    count = next(count for one, count in case.plans if one == plan)
    return (_megatron if case.table == "Korthikanti" else _titan)(case, plan, count, profile)


def _megatron(case: Case, plan: Plan, count: int, profile: Profile) -> float:
    """State and activations of the blocks on the first rank of pipe, which keeps most."""
    model, micro_batch, policy = case.model, plan.micro_batch or 1, plan.memory.recompute
    # Each rank keeps its part of what enters a region, and gathers it again.
    tensor = replace(plan.tensor, regather=plan.tensor.sequence)
    local = sizes(profile, replace(plan, tensor=tensor, memory=Memory("none")))
    if policy == "full":
        saved = sizes(profile, replace(plan, memory=Memory("full"))).block_saved
    else:
        masks = 2 * model.sequence * model.hidden  # of one byte, behind attention and behind the MLP
        saved = local.block_saved + masks / (plan.tensor.x if plan.tensor.sequence else 1)
        saved += SCORE_BYTES * model.heads * model.sequence**2 / plan.tensor.x if policy == "none" else 0
    blocks = model.layers / plan.pipe.degree
    alive = alive_at_once(plan.pipe.schedule, plan.pipe.degree, count, tuple(plan.pipe.options.items()))[0]
    state = MEGATRON_STATE_BYTES * blocks * local.block_numel
    return state + saved * micro_batch * blocks * plan.pipe.degree / plan.pipe.num_stages * alive


def _titan(case: Case, plan: Plan, count: int, profile: Profile) -> float:
    return max(_titan_rank(case, plan, count, profile, rank) for rank in range(plan.pipe.degree))


def _titan_rank(case: Case, plan: Plan, count: int, profile: Profile, rank: int) -> float:
    local, pipe, x = sizes(profile, plan), plan.pipe.degree, plan.tensor.x
    blocks = math.ceil(case.model.layers / pipe)
    ends = (rank == 0) * local.first_numel + (rank == pipe - 1) * local.last_numel
    numel = blocks * local.block_numel + ends
    state = TITAN_STATE_BYTES * numel / (plan.shard.degree * plan.context.degree)
    # In use: two blocks and the root, or all parameters and gradients. In pools: what was gathered, what is reduced.
    gathered = 2 * (2 * local.block_numel + ends) if pipe == 1 else (2 + 4) * numel
    pools = 2 * (2 * local.block_numel + ends) + 4 * (local.block_numel + ends)
    per_micro_batch = (plan.micro_batch or 1) / plan.context.degree
    alive = alive_at_once(plan.pipe.schedule, pipe, count, tuple(plan.pipe.options.items()))[rank]
    saved = _titan_saved(case, plan, profile) * blocks * plan.pipe.degree / plan.pipe.num_stages * alive
    logits = case.model.sequence * case.model.vocabulary / x if rank == pipe - 1 else 0.0
    at_loss = logits * _logit_bytes(case, plan) + local.stream_bytes  # and what the head was given, whole
    recomputed = sizes(profile, replace(plan, memory=Memory("none"))).block_saved  # of one block, whatever was saved
    moment = max(at_loss if logits else 0.0, recomputed)
    messages = local.stream_bytes / x * (2 * count + alive) if pipe > 1 else 0.0
    return state + gathered + pools + (saved + moment + messages) * per_micro_batch


def _titan_saved(case: Case, plan: Plan, profile: Profile) -> float:
    """What a block keeps of one sequence."""
    model, name = case.model, profile.blocks[-1].name
    kept = model.sequence * model.hidden  # its input
    if plan.memory.recompute == "selective":
        linears = [layer for key, layer in profile.layers.items() if key.startswith(f"{name}.") and layer.is_linear]
        results = [layer.rows * layer.out_features for layer in linears][::2]
        kept += sum(results[:-1] if case.software.fused else results) + model.sequence * model.hidden  # attention's
    return 2 * kept / plan.tensor.x


def _logit_bytes(case: Case, plan: Plan) -> int:
    if case.compiled_loss:
        return COMPILED_LOGIT_BYTES
    return SPLIT_LOGIT_BYTES if plan.tensor.x > 1 else EAGER_LOGIT_BYTES
