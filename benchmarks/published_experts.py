"""Rows of "MoE Parallel Folding" (arXiv 2504.14960): models with experts, trained with Megatron-Core on H100."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

from published_case import Case, Row, ints, make_pipe, nodes, parts, rate
from published_models import Model, named_with_experts

from weft.plan import Context, Memory, Plan, Recompute, Shard, Tensor
from weft.planner.frameworks import CORE_EXPERTS, CORE_FSDP

PEAK = 989.5e12
MEMORY_BYTES = 76e9  # of 80e9: the rest is the CUDA context, NCCL and what the allocator loses


def folding(row: Row) -> Iterator[Case]:
    """`etp` is over how many ranks each expert is split: without folding `tp`, with it 1, where nothing is printed."""
    devices, sequence, batch, context, tensor, expert, pipe = ints(
        row, "num_gpus", "seq_len", "gbs", "cp", "tp", "ep", "pp"
    )
    model, method = named_with_experts(row["model"], sequence), row["method"]
    is_folded = "Folding" in method
    if int(row["etp"] or (1 if is_folded else tensor)) != (1 if is_folded else tensor):
        raise ValueError(f"etp = {row['etp']}: with folding experts are whole, without it tp splits them")
    plan = Plan(
        pipe=make_pipe(pipe),
        expert=expert,
        tensor=Tensor(tensor, sequence=tensor > 1),
        context=Context(context),
        precision="bf16",
    )
    if is_folded:
        plan = _fold(plan)
    rest = parts(devices, plan.num_ranks, "num_gpus")
    if method.startswith("FSDP"):
        plan = replace(plan, shard=Shard(rest, 3), memory=Memory(accumulate="slice"))
    else:
        plan = replace(plan, data=rest)
    # CUDA 12.6 and PyTorch 2.5, of late 2024: Transformer Engine then takes cuDNN's attention on Hopper.
    known = CORE_FSDP if method.startswith("FSDP") else CORE_EXPERTS
    software = replace(known, attention="flash3", many_tiles=True, splits_experts=not is_folded)
    seconds = model_flops(model) * batch / devices / (rate(row["mfu"]) / 100 * PEAK)
    label = f"{row['model']} {method} {devices} GPUs {batch} × {sequence}"
    plans = tuple(_plans(model, plan, batch, not is_folded))
    group = (row["model"], devices, batch, sequence)
    yield Case(f"MoE folding {_kind(method)}", label, model, nodes("h100", devices), software, plans, seconds, group)


def _kind(method: str) -> str:
    return "FSDP" if method.startswith("FSDP") else "MCore" if method.startswith("MCore") else method


def _fold(plan: Plan) -> Plan:
    """Experts over x, over context and x, or over these and so many ranks of data as `expert` says."""
    tensor, context = plan.tensor.x, plan.context.degree
    if plan.expert == tensor:
        return replace(plan, expert=1, expert_over=("x",))
    rest = parts(plan.expert, context * tensor, "ep")
    return replace(plan, expert=rest, expert_over=("context", "x") if context > 1 else ("x",))


def model_flops(model: Model) -> float:
    """FLOPs of a step with one sequence as Megatron-LM counted them in 2024: attention whole, no router."""
    heads = 1 + model.key_value_heads / model.heads + model.sequence / model.hidden
    mlp = 1.5 * (model.chosen * model.inner + model.shared) / model.hidden
    head = model.vocabulary / (2 * model.layers * model.hidden)
    return 12 * model.sequence * model.layers * model.hidden**2 * (heads + mlp + head)


def _plans(model: Model, plan: Plan, batch: int, splits_experts: bool) -> Iterator[tuple[Plan, int]]:
    """Interleaving and recompute are not printed: those that fit. Neither is the micro-batch: one sequence, as in
    Megatron-LM's example for Mixtral.
    """
    pipe, each = plan.pipe.degree, model.layers // plan.pipe.degree
    all_chunks = [n for n in range(1, each + 1) if each % n == 0] if pipe > 1 else [1]
    policies: tuple[Recompute, ...] = ("none", "full")
    for recompute, chunks in itertools.product(policies, all_chunks):
        count, rest = divmod(batch, plan.num_batch_ranks)
        memory = replace(plan.memory, recompute=recompute)
        one = replace(plan, pipe=make_pipe(pipe, chunks), micro_batch=1, memory=memory)
        is_whole = not rest and (chunks == 1 or count % pipe == 0)
        if is_whole and held_bytes(model, one, count, splits_experts) < MEMORY_BYTES:
            yield one, count


def held_bytes(model: Model, plan: Plan, count: int, splits_experts: bool) -> float:
    """What the first rank of pipe holds, nearly: state, and activations as flash attention and SwiGLU keep them."""
    x, pipe, layers = plan.tensor.x, plan.pipe.degree, model.layers / plan.pipe.degree
    hidden, keys = model.hidden, model.hidden * model.key_value_heads / model.heads
    expert_parts = plan.num_expert_parts * (x if splits_experts else 1)
    experts = layers * model.experts * 3 * hidden * model.inner / expert_parts
    others = layers * (2 * hidden * (hidden + keys) + 3 * hidden * model.shared) / x + model.vocabulary * hidden / x
    ranks = plan.data * plan.expert * plan.context.degree
    expert_ranks = max(1, ranks * x // expert_parts)
    # 16-bit weights and fp32 gradients; the optimizer's state over all ranks with the same parameters.
    state = (others + experts) * 18 / plan.shard.degree
    if plan.shard.degree == 1:
        state = 6 * (others + experts) + 12 * (others / ranks + experts / expert_ranks)
    tokens = model.sequence * (plan.micro_batch or 1) / (plan.context.degree * x)
    kept = 6 * hidden + 2 * keys + 3 * model.shared + model.chosen * (2 * hidden + 3 * model.inner)
    kept += model.chosen * hidden * (x - 1) * splits_experts  # rows that ranks of x have gathered
    kept = hidden if plan.memory.recompute == "full" else kept
    alive = min(count, pipe * (1 + (pipe - 1) / (pipe * plan.pipe.chunks)) if plan.pipe.chunks else pipe)
    return state + 2 * tokens * kept * layers * alive
