"""The parts of the pipeline that need no ranks: traces, cuts, stages' models, draws, late gradients, and refusals."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import models_for_tests as plain
import pipeline_for_tests as models
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_for_tests import WIDTH, Batch, ModelFn, chain, images, make, staged, tokens, vectors
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.functional_call import call_with
from weft.inspection.nested_tensors import copy_structure, map_tensors, tensors_in
from weft.parallel.apply import parallelize, refuse
from weft.pipeline.build import stage
from weft.pipeline.deferred_weight_grads import DeferredWeightGrads
from weft.pipeline.partition import Route, cut, partition, unit_order
from weft.pipeline.shared_parameters import tied_stages
from weft.pipeline.stage import StageRng, is_random
from weft.pipeline.stand_in import AbsentModule, skeleton
from weft.pipeline.trace import END, Trace, TracedTensor, TraceEvent, trace
from weft.plan import Memory, Pipe, Plan, Shard, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.schedule import Edge, check, make_schedule, with_messages

CPU = torch.device("cpu")


def traced(model_fn: ModelFn, inputs: Tensor) -> Trace:
    return trace(skeleton(make(model_fn)), (inputs,), {}, torch.float64, CPU)


# --- traces


def test_a_trace_lists_calls_and_the_operations_between() -> None:
    found = traced(models.Shared, models.double(vectors()(0))[0])
    names = [event.name for event in found.events]
    assert names[:3] == ["enter", "exp", "mul"]  # of the scale, a parameter of the root
    assert names[-3:] == ["linear", "head", END]
    assert [event.name for event in found.events if event.is_call] == [
        "enter",
        *(f"blocks.{index}" for index in range(4)),
        "head",
    ]
    by_name = {event.name: event for event in found.events}
    assert by_name["exp"].parameters == {"scale"}
    assert by_name["linear"].parameters == {"enter.weight"}
    assert by_name["head"].parameters == frozenset()
    assert found.values[by_name["enter"].outputs[0]] == TracedTensor((4, WIDTH), torch.float64, needs_gradient=True)


ALL: dict[str, tuple[ModelFn, Callable[[int], Callable[[int], Batch]]]] = {
    "fan": (models.Fan, vectors),
    "mixed": (models.Mixed, vectors),
    "in place": (models.InPlace, vectors),
    "looking": (models.Looking, vectors),
    "graph": (lambda: models.Graph(1), vectors),
    "vit": (models.ViT, images),
    "resnet": (models.ResNet, images),
    "decoder": (models.decoder, tokens),
    "transformers gpt2": (plain.hf_gpt2, tokens),
    "transformers llama": (plain.hf_llama, tokens),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.sampled(2)
@pytest.mark.full(2)
def test_every_process_numbers_alike_whatever_the_batch(name: str) -> None:
    model_fn, batch = ALL[name]
    small, again, large = (traced(model_fn, models.double(batch(size)(size))[0]) for size in (2, 2, 3))
    assert small == again
    assert small.events == large.events
    assert [value.dtype for value in small.values] == [value.dtype for value in large.values]
    assert [v.needs_gradient for v in small.values] == [v.needs_gradient for v in large.values]


@pytest.mark.parametrize("model_fn", [models.ResNet, plain.SharedModule, models.decoder])
def test_profiling_and_tracing_leave_a_model_as_it_was(model_fn: ModelFn) -> None:
    model = make(model_fn)
    batch = {models.ResNet: images()(0), models.decoder: tokens()(0)}.get(model_fn, plain.vector_batch(0))  # type: ignore[call-overload]
    inputs = models.double(batch)[0]
    before = {name: (id(value), value.clone()) for name, value in model.state_dict(keep_vars=True).items()}
    profile(model, lambda: (inputs,))
    trace(model, (inputs,), {}, torch.float64, CPU)
    after = model.state_dict(keep_vars=True)
    for name, (identity, value) in before.items():
        assert id(after[name]) == identity
        assert torch.equal(after[name], value)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_module_in_two_places_is_called_with_other_tensors_in_both() -> None:
    model = make(plain.SharedModule)
    state = {name: torch.zeros_like(parameter) for name, parameter in model.named_parameters()}
    inputs = models.double(plain.vector_batch(0))[0]
    assert not call_with(model, state, (inputs,)).any()
    assert model(inputs).any()


# --- cuts: random traces


@st.composite
def traces(draw: st.DrawFn) -> tuple[Trace, dict[str, int], int]:
    """Events over random earlier tensors, of which the first are parameters; and stages that never fall."""
    num_parameters, num_stages = draw(st.integers(0, 3)), draw(st.integers(1, 4))
    count, num_values, calls = draw(st.integers(1, 14)), num_parameters, 0
    events, lineage, stage_of = [], {i: frozenset([f"p{i}"]) for i in range(num_parameters)}, {}
    current = 0
    for _ in range(count):
        chosen = draw(st.lists(st.integers(0, num_values - 1), max_size=3, unique=True)) if num_values else []
        is_call = not chosen or draw(st.booleans())
        outputs = tuple(range(num_values, num_values + draw(st.integers(0 if chosen and not is_call else 1, 2))))
        num_values += len(outputs)
        parameters = frozenset().union(*(lineage.get(number, frozenset()) for number in chosen))
        if not is_call and all(number in lineage for number in chosen):
            lineage |= dict.fromkeys(outputs, parameters)
        if is_call:
            current = min(num_stages - 1, current + draw(st.integers(0, 1)))
            stage_of[f"unit{calls}"] = current
        events.append(TraceEvent(f"unit{calls}" if is_call else "add", is_call, tuple(chosen), outputs, parameters))
        calls += is_call
    last = draw(st.lists(st.integers(0, num_values - 1), min_size=1, max_size=2, unique=True))
    parameters = frozenset().union(*(lineage.get(number, frozenset()) for number in last))
    events.append(TraceEvent(END, False, tuple(last), (), parameters))
    values = tuple(TracedTensor((2,), torch.float64, True) for _ in range(num_values))
    found = Trace(tuple(events), values, {f"p{i}": i for i in range(num_parameters)})
    return found, stage_of, num_stages


@settings(max_examples=3 * settings.default.max_examples)
@given(traces())
def test_every_stage_has_what_it_needs_and_nothing_else_crosses(given: tuple[Trace, dict[str, int], int]) -> None:
    found, stage_of, num_stages = given
    route = cut(found, stage_of, num_stages)
    crossing = {(int(edge.name), edge.target): edge.source for edge in route.edges}
    assert len(crossing) == len(route.edges)
    used: set[tuple[int, int]] = set()
    for own in range(num_stages):
        has = {found.parameters[name] for name in route.parameters[own]}
        taken: set[int] = set()
        for place, event in enumerate(found.events):
            if not route.does(own, place):
                continue
            for number in event.inputs if route.stages[place] is not None else ():
                if (number, own) in crossing:
                    taken.add(number)
                else:
                    assert number in has, (own, event)
            assert event.outputs or route.stages[place] is None or event.name == END
            has.update(event.outputs)
        used |= {(number, own) for number in taken}
    assert used == set(crossing)
    for (number, target), source in crossing.items():
        maker = next(place for place, event in enumerate(found.events) if number in event.outputs)
        assert route.stages[maker] == source < target


@settings(max_examples=3 * settings.default.max_examples)
@given(traces())
def test_who_does_an_event(given: tuple[Trace, dict[str, int], int]) -> None:
    found, stage_of, num_stages = given
    route = cut(found, stage_of, num_stages)
    for place, event in enumerate(found.events):
        doing = {own for own in range(num_stages) if route.does(own, place)}
        if event.name == END:
            assert doing == {num_stages - 1}
        elif event.is_call:
            assert doing == {stage_of[event.name]}
        elif not event.outputs:
            assert doing == set(range(num_stages))  # it looks at shapes
        elif route.stages[place] is None:
            assert doing == {own for own in range(num_stages) if event.parameters <= route.parameters[own]}
        else:
            assert doing == {route.stages[place]}
    for own, last in enumerate(route.last_event):
        assert not any(route.stages[place] == own for place in range(last + 1, len(found.events)))


@given(traces(), st.sampled_from(["gpipe", "1f1b", "zero-bubble", "message"]), st.integers(1, 4))
def test_every_cut_runs_under_its_schedule(given: tuple[Trace, dict[str, int], int], name: str, count: int) -> None:
    found, stage_of, num_stages = given
    check(with_messages(make_schedule(name, num_stages, count), cut(found, stage_of, num_stages).edges))


def test_what_changes_in_place_is_seen_by_its_own_stage_only() -> None:
    pipe = Pipe(2, split=("blocks.3",))
    assert staged(models.Changing, pipe).route.num_stages == 2
    with pytest.raises(
        PlanError, match=r"'blocks\.1' in stage 1 changes a tensor in place that stage 2 uses too; do it"
    ):
        staged(models.Changing, Pipe(3, split=("blocks.1", "blocks.2")))


def test_what_was_handed_on_is_not_changed_after() -> None:
    class Late(models.Chain):
        def forward(self, inputs: Tensor) -> Tensor:
            first = self.blocks[0](self.enter(inputs))
            hidden = self.blocks[1](first)
            first.mul_(2)
            logits: Tensor = self.head(self.blocks[3](self.blocks[2](hidden)) + first)
            return logits

    with pytest.raises(PlanError, match="'mul_' in stage 0 changes a tensor in place that stage 1 uses too"):
        staged(lambda: Late(4), Pipe(2, split=("blocks.1",)))


# --- cuts: balance


def chain_trace(count: int) -> Trace:
    events = [TraceEvent(f"unit{i}", True, (i - 1,) if i else (), (i,)) for i in range(count)]
    return Trace(
        (*events, TraceEvent(END, False, (count - 1,), ())),
        tuple(TracedTensor((1,), torch.float32, True) for _ in events),
        {},
    )


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_stages_are_balanced_as_well_as_can_be(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    names = [f"unit{index}" for index in range(count)]
    weights = dict(zip(names, data.draw(st.lists(st.integers(0, 9), min_size=count, max_size=count)), strict=True))
    blocks = data.draw(st.lists(st.sampled_from(names), min_size=1, unique=True))
    num_stages = data.draw(st.integers(1, len(blocks)))
    slow = data.draw(st.integers(0, num_stages))  # at the first stages units take twice as long
    by_stage = [{name: 2 * weight for name, weight in weights.items()}] * slow + [weights] * (num_stages - slow)
    found = partition(chain_trace(count), blocks, by_stage, Pipe(num_stages))

    def heaviest(begins: tuple[int, ...]) -> float:
        bounds = (0, *begins, count)
        parts = [names[a:b] for a, b in itertools.pairwise(bounds)]
        if not all(set(part) & set(blocks) for part in parts):
            return float("inf")
        return max(sum(own[name] for name in part) for part, own in zip(parts, by_stage, strict=True))

    best = min(map(heaviest, itertools.combinations(range(1, count), num_stages - 1)))
    begins = tuple(place for place in range(1, count) if found[names[place]] != found[names[place - 1]])
    assert list(found) == names
    assert sorted(set(found.values())) == list(range(num_stages))
    assert heaviest(begins) == best


def test_time_and_memory_balance_by_other_weights() -> None:
    by_time = staged(chain(4), Pipe(2)).stage_of
    assert [by_time[f"blocks.{index}"] for index in range(4)] == [0, 0, 1, 1]
    inputs = vectors()(0)[0]

    def first_stage(balance: Any) -> int:
        model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(3)], Wide(), nn.Linear(WIDTH, 5))
        found = stage(profile(model, lambda: (inputs,)), Plan(pipe=Pipe(2, balance=balance)))
        return sum(own == 0 for own in found.stage_of.values())

    assert (first_stage("time"), first_stage("memory")) == (2, 3)


class Wide(nn.Module):
    """Much state and little work."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.randn(200, WIDTH))

    def forward(self, value: Tensor) -> Tensor:
        return value + self.rows[0]


def test_units_are_in_the_order_of_their_calls() -> None:
    found = staged(models.UNet, Pipe(2))
    assert unit_order(found.route.trace) == [*(f"down.{i}" for i in range(4)), *(f"up.{i}" for i in range(4)), "head"]


def test_edges_of_a_u_net() -> None:
    found = staged(models.UNet, Pipe(4, split=("down.2", "up.0", "up.2"))).route
    made = {number: event.name for event in found.trace.events for number in event.outputs}
    assert sorted((made[int(edge.name)], edge.source, edge.target) for edge in found.edges) == [
        ("cat", 1, 2),
        ("cat", 2, 3),
        ("down.0", 0, 3),
        ("down.1", 0, 1),
        ("down.1", 0, 2),
        ("down.2", 1, 2),
    ]
    assert all(edge.backward for edge in found.edges)


def test_what_needs_no_gradient_has_no_way_back() -> None:
    found = staged(models.Frozen, Pipe(2, split=("blocks.1",))).route
    assert [edge[:2] for edge in found.edges] == [(0, 1)]
    assert not found.edges[0].backward
    mixed = staged(models.Mixed, Pipe(2, split=("blocks.2",))).route
    kinds = {mixed.trace.values[int(edge.name)].dtype: edge.backward for edge in mixed.edges if edge.backward is False}
    assert kinds == {torch.bool: False, torch.long: False, torch.float64: False}


# --- stages' models


@pytest.mark.parametrize("model_fn", [models.Shared, models.Queries, plain.SharedModule, models.ViT, models.InPlace])
def test_stages_hold_all_parameters_between_them(model_fn: ModelFn) -> None:
    batch = images()(0) if model_fn is models.ViT else vectors()(0)
    batch = plain.vector_batch(0) if model_fn is plain.SharedModule else batch
    found = staged(model_fn, Pipe(2), batch)
    held = [set(found.model(own)[1].values()) for own in range(2)]
    assert held[0] | held[1] == {name for name, _ in make(model_fn).named_parameters()}
    assert held[0] & held[1] == set(found.tied)


def test_who_holds_what() -> None:
    found = staged(models.Shared, Pipe(2, split=("blocks.2",)))
    first, last = (set(found.model(own)[1].values()) for own in range(2))
    unused = {"inner.idle", "unused.weight", "unused.bias"}
    assert unused <= first  # nothing uses them, and a checkpoint is to have them
    assert not unused & last
    assert "inner.shift" in first
    assert "inner.shift" not in last
    assert found.tied == {"scale": (0, 1), "enter.weight": (0, 1)}
    assert not {name for name in last if name.startswith(("enter.bias", "blocks.0", "blocks.1"))}


def test_a_module_that_hangs_in_two_places_is_replaced_in_both() -> None:
    class Twice(models.Chain):
        def __init__(self) -> None:
            super().__init__(2)
            self.alias = nn.ModuleDict({"entry": self.enter})

    found = staged(Twice, Pipe(2, split=("blocks.1",)))
    model, names = found.model(1)
    assert isinstance(model.get_submodule("enter"), AbsentModule)
    assert model.get_submodule("alias.entry") is model.get_submodule("enter")
    assert not [name for name in names.values() if name.startswith("enter")]


def test_a_stand_in_can_be_asked() -> None:
    model, _ = staged(chain(2), Pipe(2)).model(1)
    entry = model.get_submodule("enter")
    assert isinstance(entry, AbsentModule)
    assert entry.in_features == WIDTH
    assert not list(entry.parameters())


def test_tied_parameters() -> None:
    uses = [{"a": "a", "b": "shared"}, {"c": "c"}, {"d": "shared", "e": "shared"}, {"c": "c"}]
    assert tied_stages(uses) == {"c": (1, 3), "shared": (0, 2)}


# --- nested values


@dataclass(frozen=True)
class Record:
    tensor: Tensor
    inside: Any
    note: str = "kept"


nested = st.recursive(
    st.builds(lambda: torch.zeros(1)) | st.none() | st.integers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from("abc"), inner, max_size=3)
        | st.tuples(inner, inner)
        | st.builds(lambda value: Record(torch.zeros(1), value), inner)
    ),
    max_leaves=8,
)


@given(nested)
def test_tensors_are_found_and_changed_wherever_they_are(value: Any) -> None:
    found = tensors_in(value)
    changed = map_tensors(lambda tensor: tensor + 1, value)
    assert [float(tensor) for tensor in tensors_in(changed)] == [1.0] * len(found)
    assert all(float(tensor) == 0.0 for tensor in found)
    again = tensors_in(copy_structure(value))
    assert [id(tensor) for tensor in again] == [id(tensor) for tensor in found]


def test_a_copy_of_a_dict_is_another_dict() -> None:
    given = {"hidden": torch.zeros(1), "others": [torch.ones(1)]}
    made = copy_structure(given)
    made.pop("hidden")
    made["others"].clear()
    assert len(tensors_in(given)) == 2


# --- draws


def test_stages_draw_alike_in_common_and_apart_on_their_own() -> None:
    def run(own: int, num_own_draws: int) -> tuple[list[float], list[float]]:
        torch.manual_seed(3)
        draws, common, apart = StageRng(own, CPU), [], []
        common.append(float(torch.rand(())))
        draws.use_own()
        for _ in range(num_own_draws):
            apart.append(float(torch.rand(())))
        draws.use_shared()
        common.append(float(torch.rand(())))
        draws.use_own()
        apart.append(float(torch.rand(())))
        draws.end()
        common.append(float(torch.rand(())))
        return common, apart

    first, second, third = run(0, 2), run(1, 2), run(1, 3)
    assert first[0] == second[0] == third[0]
    assert not set(first[1]) & set(second[1])
    assert second[1] == third[1][:3]
    assert len(set(third[1])) == 4


@pytest.mark.parametrize("name", ["rand", "randn_like", "randint", "bernoulli", "dropout", "normal_", "multinomial"])
def test_operations_that_draw(name: str) -> None:
    assert is_random(name)


@pytest.mark.parametrize("name", ["add", "__add__", "__eq__", "cat", "relu", "no such operation"])
def test_operations_that_do_not_draw(name: str) -> None:
    assert not is_random(name)


# --- late gradients


def test_late_gradients_are_those_of_an_ordinary_backward() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()
    inputs = torch.randn(5, 2, 3, dtype=torch.float64, requires_grad=True)
    model(inputs).square().sum().backward()
    assert inputs.grad is not None
    expected = [inputs.grad.clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
    model.zero_grad()
    inputs.grad = None
    delivered: list[Tensor] = []
    deferred = DeferredWeightGrads(model, delivered.append)
    model(inputs).square().sum().backward()
    assert torch.allclose(inputs.grad, expected[0], rtol=1e-13)  # type: ignore[arg-type]
    assert [parameter.grad for parameter in model.parameters()] == [None] * 3
    finish = deferred.collect()
    finish()
    assert {id(parameter) for parameter in delivered} == {id(parameter) for parameter in model.parameters()}
    for parameter, gradient in zip(model.parameters(), expected[1:], strict=True):
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, gradient, rtol=1e-13)
    delivered.clear()
    deferred.collect()()  # nothing is done twice
    assert not delivered


def test_a_frozen_weight_with_a_trained_bias_is_not_put_off() -> None:
    linear = nn.Linear(3, 2).double()
    linear.weight.requires_grad_(False)
    deferred = DeferredWeightGrads(nn.Sequential(linear), lambda parameter: None)
    linear(input=torch.ones(4, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(linear.bias.grad, torch.full((2,), 4.0, dtype=torch.float64))  # type: ignore[arg-type]
    deferred.collect()()


# --- refusals


class Peeking(models.Chain):
    """Looks at the values of a result, in its own code."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.blocks[0](self.enter(inputs))
        if hidden.sum() > 0:
            hidden = -hidden
        for block in self.blocks[1:]:
            hidden = block(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class PeekingBlock(models.Block):
    def forward(self, value: Tensor) -> Tensor:
        return super().forward(value) if value.max().item() > 0 else value


class PeekingInside(models.Chain):
    """Has a block that looks at the values of its input."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[1] = PeekingBlock()


class Gathering(models.Chain):
    """Writes results into a tensor that comes from nowhere."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        gathered = torch.zeros(len(self.blocks), *hidden.shape, dtype=hidden.dtype)
        for place, block in enumerate(self.blocks):
            hidden = block(hidden)
            gathered[place] = hidden
        logits: Tensor = self.head(gathered.sum(0))
        return logits


class Nested(models.Chain):
    """Uses a parameter deep inside a block from outside."""

    def __init__(self) -> None:
        super().__init__(3)
        self.blocks[0] = nn.Sequential(models.Block())

    def forward(self, inputs: Tensor) -> Tensor:
        weight: Tensor = dict(self.blocks[0].named_parameters())["0.linear.weight"]
        return super().forward(inputs) + weight[0, :5]


def all_models(model_fn: ModelFn, pipe: Pipe, batch: Batch) -> list[nn.Module]:
    found = staged(model_fn, pipe, batch)
    return [found.model(own)[0] for own in range(found.num_stages)]


UNITS = "enter, blocks.0, blocks.1, blocks.2, blocks.3, blocks.4, head"
REFUSED: dict[str, tuple[ModelFn, Pipe, str]] = {
    "more stages than blocks": (
        chain(2),
        Pipe(3),
        "3 stages need as many blocks, and the model's forward calls 2; use at most 2",
    ),
    "more chunks than blocks": (chain(5), Pipe(2, "interleaved", chunks=3), "6 stages need as many blocks, .* calls 5"),
    "a name that is no unit": (
        models.Chain,
        Pipe(2, split=("block.1",)),
        f"pipe.split names 'block.1', which is not among the units: {UNITS}",
    ),
    "a part of a unit": (models.Chain, Pipe(2, split=("blocks.1.linear",)), "'blocks.1.linear', which is not among"),
    "too few names": (models.Chain, Pipe(3, split=("blocks.1",)), "pipe.split names 1 modules, but 3 stages have 2"),
    "another order": (models.Chain, Pipe(3, split=("blocks.2", "blocks.1")), "is not in the order of the forward"),
    "one name twice": (models.Chain, Pipe(3, split=("blocks.2", "blocks.2")), "is not in the order of the forward"),
    "an empty first stage": (models.Chain, Pipe(2, split=("enter",)), "or leaves the first stage empty"),
    "a look at values": (
        Peeking,
        Pipe(2),
        r"after 'blocks\.0' its forward depends on the values of a result .*use pipe = 1",
    ),
    "a look at values inside": (PeekingInside, Pipe(2), r"inside 'blocks\.1' its forward depends on the values"),
    "a chain that goes back": (
        plain.CalledTwice,
        Pipe(2, split=("layers.1",)),
        r"'layers\.0' is in stage 0 but takes what stage 1 makes, so the chain goes back; put both into one stage",
    ),
    "a tensor from nowhere": (Gathering, Pipe(2), "writes a result into a tensor that is none .*__setitem__"),
    "a parameter deep inside": (Nested, Pipe(2), r"uses parameter 'blocks\.0\.0\.linear\.weight' of another stage"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    model_fn, pipe, message = REFUSED[name]
    batch = plain.vector_batch(0) if model_fn is plain.CalledTwice else vectors()(0)
    with pytest.raises(PlanError, match=message):
        all_models(model_fn, pipe, batch)


PLANS: dict[str, tuple[Plan, str]] = {
    "gems of odd batches": (Plan(pipe=Pipe(2, "gems", batches=3)), "gems: batches = 3 is odd"),
    "mirrors of odd ranks": (Plan(pipe=Pipe(3, "bidirectional")), "bidirectional: 3 ranks are odd"),
    "gems of odd ranks": (Plan(pipe=Pipe(3, "gems")), "gems: 3 ranks are odd"),
    "an option of another schedule": (Plan(pipe=Pipe(2, chunks=2)), "schedule '1f1b' has no option 'chunks'"),
    "message beside shard": (
        Plan(pipe=Pipe(2, "message"), shard=Shard(2)),
        r"lets each rank choose its own order, but the ranks of a stage \(shard = 2\) must share one; use data beside",
    ),
    "message beside x": (Plan(pipe=Pipe(2, "message"), tensor=TensorPlan(2)), r"\(x = 2\) must share one"),
    "zero-bubble beside x": (Plan(pipe=Pipe(2, "zero-bubble"), tensor=TensorPlan(2)), "use 1f1b or interleaved with"),
    "slices": (
        Plan(pipe=Pipe(2), shard=Shard(2), memory=Memory(accumulate="slice")),
        "memory.accumulate = 'slice' reduces each micro-batch, which a pipeline does not; use 'whole'",
    ),
}


@pytest.mark.parametrize("name", PLANS)
def test_refused_plans(name: str) -> None:
    plan, message = PLANS[name]
    inputs = vectors()(0)[0]
    with pytest.raises(PlanError, match=message):
        refuse(profile(models.Chain(), lambda: (inputs,)), plan)


def test_micro_batches_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="gems: batches = 4 does not divide micro_batches = 6; use a divisor"):
        split_batch(Plan(pipe=Pipe(2, "gems", batches=4), micro_batch=1), 6, 1)
    with pytest.raises(PlanError, match="gems: batches = 3 is odd; the two replicas take turns, so use 1 or an even"):
        split_batch(Plan(pipe=Pipe(2, "gems"), micro_batch=1), 3, 1)


def test_a_pipeline_without_an_example_is_refused() -> None:
    with pytest.raises(PlanError, match="pipe = 2 cuts the model where a forward goes through it; pass example="):
        stage(profile(models.Chain()), Plan(pipe=Pipe(2)))
    assert parallelize(models.Chain(), Plan()) is not None  # without pipe none is needed


def test_a_forward_that_another_shape_leads_elsewhere_is_refused() -> None:
    class Sized(models.Chain):
        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.enter(inputs)
            kept = hidden if len(inputs) > 2 else None
            for block in self.blocks:
                hidden = block(hidden)
            logits: Tensor = self.head(hidden if kept is None else hidden + kept)
            return logits

    from weft.pipeline.build import _RouteFinder

    routes = _RouteFinder(staged(Sized, Pipe(2)), CPU)
    assert isinstance(routes.find((models.double(vectors(3)(0))[0],), {}), Route)
    with pytest.raises(PlanError, match="takes another way for inputs of another shape"):
        routes.find((models.double(vectors(2)(0))[0],), {})


def test_inputs_of_the_shapes_of_the_example_are_not_traced_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from weft.pipeline import tracer
    from weft.pipeline.build import _RouteFinder

    staging = staged(models.Chain, Pipe(2))
    routes, num_traces = _RouteFinder(staging, CPU), []
    traced = tracer.trace
    monkeypatch.setattr(tracer, "trace", lambda *args, **more: (num_traces.append(1), traced(*args, **more))[1])
    (example,) = staging.example()
    for training, rows, expected in [(True, 0, 0), (False, 0, 1), (False, 0, 1), (True, 1, 2), (True, 1, 2)]:
        routes.find((torch.cat([example, example[:rows]]),), {}, training)
        assert len(num_traces) == expected


def test_random_splits_are_in_order() -> None:
    for seed in range(2):
        num_stages = random.Random(seed).randint(2, 5)
        split = models.random_split(seed, num_stages)
        assert len(split) == num_stages - 1
        found = staged(lambda seed=seed: models.Graph(seed), Pipe(num_stages, split=split))  # type: ignore[misc]
        assert all(isinstance(edge, Edge) for edge in found.route.edges)
        assert sorted(set(found.stage_of.values())) == list(range(num_stages))
