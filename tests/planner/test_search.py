"""The search against trying everything, its closed forms against the simulated lists and the strategies' own costs."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

import pytest
import torch

from weft.cluster.hardware import Cluster, load
from weft.compile.saved_bytes import compiled_profile, profile_under
from weft.models import DecoderConfig, GPT2Config, build
from weft.models.loss import ExampleLoss
from weft.models.loss_head import install_loss_head, is_loss_in_head
from weft.parallel.apply import cost
from weft.pipeline.build import stage as staged
from weft.plan import Memory as MemoryPolicy
from weft.plan import Pipe, Plan, Shard, Tensor, split_batch
from weft.planner.candidate import Candidate
from weft.planner.closed_form_memory import Sizes, memory, sizes, working
from weft.planner.in_flight import alive_at_once
from weft.planner.model import planned_model
from weft.planner.other_forms import longer_plans
from weft.planner.question import Question, parse_constraints
from weft.planner.search import Model, search
from weft.planner.step import HOST_LINK_SHARE
from weft.profiling import profile
from weft.profiling.software import software_for_text
from weft.schedule.schedules import make_schedule
from weft.schedule.simulate import simulate

SMALL = GPT2Config(vocab_size=50304, n_positions=1024, n_embd=1024, n_layer=8, n_head=16)


@lru_cache(maxsize=4)
def small(cluster: str = "h100:1x8") -> Model:
    return planned_model(SMALL, 1024, load(cluster))


def everything(model: Model, batch: int, num_devices: int) -> list[tuple[float, Plan]]:
    """Every plan of a small world that fits, with its seconds, found without any bound."""
    found = []
    limit = model.steps.cluster.node.device.memory_bytes
    sizes_of: dict[tuple[Tensor, MemoryPolicy], Sizes] = {}  # all else that shapes a rank's part of a block is the same
    degrees = [d for d in range(1, num_devices + 1) if num_devices % d == 0]
    for data, pipe, shard, x, y in product(degrees, repeat=5):
        if data * pipe * shard * x * y != num_devices or batch % (data * shard):
            continue
        per_rank = batch // (data * shard)
        pipes = [Pipe()] if pipe == 1 else [Pipe(pipe), *(Pipe(pipe, "interleaved", chunks=c) for c in (2, 4))]
        pipes += [Pipe(pipe, "zero-bubble")] if pipe > 1 and x * y == 1 else []
        for own in pipes:
            if pipe * (own.chunks or 1) > 8:
                continue
            for stage, sequence, recompute in product((1, 2, 3), (False, True), ("none", "selective", "full")):
                if (shard == 1 and stage > 1) or (sequence and x == 1):
                    continue
                for micro_batch in (m for m in range(1, per_rank + 1) if per_rank % m == 0):
                    others: dict[str, Any] = {"memory": MemoryPolicy(recompute), "precision": "bf16"}
                    shards: Any = Shard(shard, stage)
                    tensor = Tensor(x, y, sequence)
                    plan = Plan(data=data, pipe=own, shard=shards, tensor=tensor, micro_batch=micro_batch, **others)
                    count = per_rank // micro_batch
                    if (tensor, plan.memory) not in sizes_of:
                        sizes_of[tensor, plan.memory] = sizes(model.profile, plan)
                    own_sizes = sizes_of[tensor, plan.memory]
                    held = memory(
                        working(own_sizes, plan, model.steps.stage_units(plan), count), own_sizes, plan, count
                    )
                    if held.total_bytes <= limit:
                        found.append((model.steps.step_seconds(plan, count), plan))
    return sorted(found, key=lambda pair: pair[0])


@pytest.mark.parametrize(("cluster", "num_devices"), [("h100:1x4", 4), ("a100-40:1x2", 2)])
def test_the_search_finds_what_trying_everything_finds(cluster: str, num_devices: int) -> None:
    model = small(cluster.replace(f"x{num_devices}", "x8"))
    node = replace(model.steps.cluster.node, num_devices=num_devices)
    model = replace(model, steps=replace(model.steps, cluster=replace(model.steps.cluster, node=node)))
    best = everything(model, 8, num_devices)
    found = search(model, Question(8, 1024), keep=5)
    assert found.num_considered <= len(best) * 4
    assert all(c.seconds <= one[0] * (1 + 1e-9) for c, one in zip(found.best, best, strict=False))


def test_the_same_question_has_the_same_answer() -> None:
    first, again = (search(small(), Question(32, 1024), keep=4) for _ in range(2))
    assert [c.plan for c in first.best] == [c.plan for c in again.best]
    assert [c.seconds for c in first.best] == sorted(c.seconds for c in first.best)


def test_constraints_are_kept() -> None:
    found = search(small(), Question(32, 1024, constraints=parse_constraints(["pipe=4", "x<=2"])))
    assert found.best
    assert all(c.plan.pipe.degree == 4 and c.plan.tensor.x <= 2 for c in found.best)
    assert search(small(), Question(32, 1024, constraints=parse_constraints(["pipe=7"]))).best == ()


def test_what_does_not_fit_is_told_apart() -> None:
    cluster = load("a100-40:1x8")
    large = DecoderConfig(
        vocab_size=32000, hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, num_key_value_heads=8
    )
    found = search(planned_model(large, 4096, cluster), Question(8, 4096))
    assert found.best == ()  # 70 billion parameters and their state on 8 × 40 GB
    assert found.too_large
    assert all(c.memory.total_bytes > cluster.node.device.memory_bytes for c in found.too_large)
    assert found.too_large[0].memory.state_bytes > 100e9


PLANS = [
    Plan(data=8, micro_batch=2),
    Plan(shard=Shard(8, 3), micro_batch=4),
    Plan(shard=Shard(4, 2), tensor=Tensor(2), micro_batch=2, memory=MemoryPolicy("full")),
    Plan(data=2, pipe=Pipe(4), micro_batch=1),
    Plan(data=2, pipe=Pipe(4, "interleaved", chunks=2), micro_batch=1),
    Plan(data=4, pipe=Pipe(2, "zero-bubble"), micro_batch=1),
]


def on_one_device(memory_bytes: int, **node_changes: Any) -> Model:
    cluster = load("h100:1x1")
    node = replace(cluster.node, device=replace(cluster.node.device, memory_bytes=memory_bytes), **node_changes)
    return small("h100:1x1").on(replace(cluster, node=node))


def test_the_least_state_that_must_goes_to_the_host() -> None:
    roomy = on_one_device(10**12)
    question = Question(4, 1024, constraints=parse_constraints(["no recompute", "micro_batch=1"]))
    whole = search(roomy, question).best[0]
    assert whole.plan.memory.offload == 0
    limit = int(whole.memory.total_bytes - 0.32 * 12 * roomy.numel)  # a third of the state, of 12 bytes a parameter
    found = search(on_one_device(limit), question)
    share = found.best[0].plan.memory.offload
    assert 0.32 <= share <= 0.4
    assert found.best[0].memory.total_bytes <= limit
    less = replace(found.best[0].plan, memory=replace(found.best[0].plan.memory, offload=round(share - 0.05, 2)))
    assert roomy.held(less, found.best[0].num_micro_batches).total_bytes > limit
    link = roomy.cluster.node.host_link_bytes_per_second
    assert link is not None
    step = found.best[0].step
    assert step is not None
    first, block, last = roomy.steps.numel
    numel = first + roomy.num_blocks * block + last - roomy.steps.tied_numel  # one stage holds a tied table once
    assert numel == roomy.numel
    assert step.optimizer_seconds == pytest.approx(share * 12 * numel / (link * HOST_LINK_SHARE))
    assert found.best[0].seconds > whole.seconds
    assert [one.plan.memory.offload for one in found.too_large] == [0]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"host_link_bytes_per_second": None}, []),
        ({"host_memory_bytes": 3 << 30}, []),
        ({}, ["no offload"]),
        ({}, ["offload<0.1"]),
    ],
)
def test_without_a_host_for_it_nothing_fits(changes: dict[str, Any], where: list[str]) -> None:
    model = on_one_device(10**12)
    limit = int(search(model, Question(4, 1024)).best[-1].memory.total_bytes - 0.5 * 12 * model.numel)
    given = parse_constraints(["no recompute", "micro_batch=1", *where])
    assert search(on_one_device(limit), Question(4, 1024, constraints=given[:2])).best
    assert not search(on_one_device(limit, **changes), Question(4, 1024, constraints=given)).best


def test_what_fits_only_so_gathers_again() -> None:
    words = ["x=8", "y=1", "sequence=true", "micro_batch=16", "no recompute", "no offload"]

    def best(limit_bytes: float, *more: str) -> Candidate | None:
        cluster = small().cluster
        device = replace(cluster.node.device, memory_bytes=int(limit_bytes))
        model = small().on(replace(cluster, node=replace(cluster.node, device=device)))
        found = search(model, Question(16, 1024, constraints=parse_constraints([*words, *more])))
        return found.best[0] if found.best else None

    whole, again = best(1e12), best(1e12, "tensor.regather=true")
    assert whole is not None
    assert again is not None
    assert (whole.plan.tensor.regather, again.plan.tensor.regather) == (False, True)
    assert again.memory.total_bytes < whole.memory.total_bytes
    assert again.seconds > whole.seconds
    assert best(whole.memory.total_bytes - 1) == again
    assert best(whole.memory.total_bytes - 1, "tensor.regather=false") is None
    assert best(again.memory.total_bytes - 1) is None


def test_more_may_be_asked_for_than_must() -> None:
    best = search(small(), Question(16, 1024, constraints=parse_constraints(["offload>=0.5"]))).best
    assert best
    assert {one.plan.memory.offload for one in best} == {0.5}


@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.describe_axes())
def test_bounds_lead_to_the_seconds_of_a_step(plan: Plan) -> None:
    plan, model = replace(plan, precision="bf16"), small()
    assert plan.micro_batch is not None
    count = 64 // plan.num_batch_ranks // plan.micro_batch
    steps, planned = model.steps, model.steps.planned_stages(plan)
    whole = replace(plan, data=1, shard=Shard(plan.data * plan.shard.degree))
    bounds = [steps.bound(whole, count), steps.closer_bound(plan, count, planned), steps.step(plan, count).seconds]
    assert 0.7 * bounds[2] < bounds[0] <= bounds[1] <= bounds[2]
    assert steps.step_seconds(plan, count, steps.planned_stages(whole)) == bounds[2]


@pytest.mark.parametrize("compiles", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(
    "plan",
    [
        *PLANS,
        Plan(pipe=Pipe(5), shard=Shard(1), micro_batch=2),
        Plan(pipe=Pipe(7, "zero-bubble"), micro_batch=2),
        Plan(data=2, pipe=Pipe(4, "zero-bubble"), micro_batch=8),
        Plan(pipe=Pipe(3, "interleaved", chunks=2), tensor=Tensor(2), micro_batch=2),
        Plan(data=2, pipe=Pipe(4, "gpipe"), micro_batch=2),
        Plan(data=8, micro_batch=4, memory=MemoryPolicy("none", activations=0.5)),
        Plan(data=4, tensor=Tensor(2, 1, True, True), micro_batch=4),
        Plan(data=2, tensor=Tensor(2, 2, True, True), micro_batch=2),
    ],
    ids=lambda plan: plan.describe_axes() + plan.memory.words,
)
@pytest.mark.sampled(9)
@pytest.mark.full(2)
def test_memory_in_closed_form_is_what_the_strategies_state(plan: Plan, compiles: bool) -> None:
    check_memory(SMALL, 1024, plan, compiles)


HEAVY = GPT2Config(vocab_size=4096, n_positions=128, n_embd=1024, n_layer=4, n_head=16)  # its head outweighs logits
LIGHT = GPT2Config(vocab_size=1024, n_positions=512, n_embd=256, n_layer=3, n_head=4)
ONE_MICRO_BATCH = Plan(data=4, pipe=Pipe(2, "zero-bubble"), micro_batch=16, memory=MemoryPolicy("selective"))


@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (HEAVY, Plan(shard=Shard(4, 2), tensor=Tensor(2, 1, True), micro_batch=16)),
        (HEAVY, ONE_MICRO_BATCH),
        pytest.param(LIGHT, ONE_MICRO_BATCH, marks=pytest.mark.full),
    ],
    ids=["heavy head", "one micro-batch", "one micro-batch of light blocks"],
)
def test_memory_in_closed_form_of_small_models(config: GPT2Config, plan: Plan) -> None:
    check_memory(config, config.n_positions, plan, compiles=True)


def check_memory(config: GPT2Config, sequence: int, plan: Plan, compiles: bool) -> None:
    plan, cluster = replace(plan, precision="bf16"), load("h100:1x8")
    model = planned_model(config, sequence, cluster, software_for_text(cluster, compiles))
    assert plan.micro_batch is not None
    with torch.device("meta"):
        whole = build(config).to(torch.bfloat16)
    if is_loss_in_head(plan):
        install_loss_head(whole)

    def tokens() -> torch.Tensor:
        return torch.zeros(plan.micro_batch or 1, sequence, dtype=torch.long, device="cpu")

    found = profile(whole, lambda: (tokens(),), ExampleLoss(tokens))
    found = profile_under(compiled_profile(found), plan) if compiles else found
    ranks = [{**dict.fromkeys(plan.degrees, 0), "pipe": index} for index in range(plan.pipe.degree)]
    stated = max(
        (cost(found, plan, split_batch(plan, 64, sequence), at) for at in ranks), key=lambda one: one.memory_bytes
    )
    if plan.pipe.degree > 1 and not compiles:  # a run is cut by its uncompiled profile
        blocks = [place for name, place in staged(found, plan).stage_of.items() if name.startswith("transformer.h.")]
        counts = [blocks.count(index) for index in range(plan.pipe.num_stages)]
        assert [units.num_blocks for units in model.steps.stage_units(plan)] == counts
    closed = model.held(plan, 64 // plan.num_batch_ranks // plan.micro_batch)
    assert closed.state_bytes == pytest.approx(sum(stated.state_bytes.values()), rel=0.01)
    if plan.pipe.schedule != "zero-bubble":  # it frees activations in backward, and `cost` calls that transient
        assert closed.saved_bytes == pytest.approx(stated.saved_bytes, rel=0.02)
    assert closed.tensor_bytes == pytest.approx(stated.memory_bytes, rel=0.02)


@pytest.mark.parametrize(
    "options",
    [
        ("1f1b", ()),
        ("1f1b", (("in_flight", 2),)),
        ("gpipe", ()),
        ("gpipe", (("in_flight", 3),)),
        ("zero-bubble", ()),
        ("zero-bubble", (("in_flight", 2),)),
        ("interleaved", (("chunks", 2),)),
        ("interleaved", (("chunks", 2), ("in_flight", 7))),
        ("bidirectional", (("in_flight", 2),)),
    ],
)
def test_activations_alive_are_those_of_the_list(options: tuple[str, tuple[tuple[str, int], ...]]) -> None:
    name, given = options
    for degree, count in product((2, 4), (1, 3, 4, 9)):
        listed = simulate(make_schedule(name, degree, count, **dict(given))).peak_activations
        assert alive_at_once(name, degree, count, given) == tuple(map(float, listed))


def test_pipelines_with_more_stages_on_a_rank_are_tried() -> None:
    plan = Plan(pipe=Pipe(2, "interleaved", chunks=4))
    assert [one.pipe.chunks for one in longer_plans(plan, 33)] == [8, 16]
    assert not [*longer_plans(plan, 15), *longer_plans(Plan(pipe=Pipe(2, "interleaved", chunks=2)), 33)]
    deep = replace(SMALL, n_layer=16)
    words = parse_constraints(["pipe=2", "x=1", "schedule=interleaved", "micro_batch=1", "no recompute"])
    found = search(planned_model(deep, 1024, load("h100:1x2")), Question(4, 1024))
    tried = search(planned_model(deep, 1024, load("h100:1x2")), Question(4, 1024, constraints=words))
    assert {one.plan.pipe.chunks for one in tried.best} >= {2, 4, 8}
    assert found.best[0].seconds <= tried.best[0].seconds


def test_a_cluster_of_many_devices_is_searched() -> None:
    cluster: Cluster = load("a100-80:16x8")
    found = search(planned_model(SMALL, 1024, cluster), Question(1024, 1024), keep=3)
    assert len(found.best) == 3
    assert all(c.plan.num_ranks == 128 for c in found.best)
