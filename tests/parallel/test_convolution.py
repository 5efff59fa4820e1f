"""Convolutions over x and y: each operation and whole models as the unsplit ones, in float64; bytes as told; refusals.

A covering sample of models × plans runs always, the full product with `-m soak`.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import images_for_tests as images
import pytest
import torch
from images_for_tests import BATCHES, MODELS, NUM_CLASSES, image_batch
from nets_for_tests import net
from sampled_for_tests import one_in
from saving_for_tests import save
from tensor_for_tests import counted, failures, saved_bytes
from torch import Tensor, nn

from weft.comm import Axis
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import token_loss
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.tensor import convolution
from weft.parallel.tensor import cuts as tensor_cuts
from weft.parallel.tensor import operations as tensor_ops
from weft.parallel.tensor.convolution import column, gathered, row
from weft.parallel.tensor.cost import traffic
from weft.plan import Memory, Plan, Recompute, Shard, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import ProofReport, verify
from weft.sharding.units import units_of
from weft.step.objective import CROSS_ENTROPY

pytestmark = pytest.mark.processes

Kind = Literal["gathered", "column", "row"]
Patch = pytest.MonkeyPatch
TOLERANCE = 1e-12
# (make the convolution, shape of an input)
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(3, 8, 3), (2, 3, 11)),
    "1d, stride, padding, dilation": (lambda: nn.Conv1d(4, 12, 3, stride=2, padding=3, dilation=2), (3, 4, 13)),
    "2d": (lambda: nn.Conv2d(4, 8, 3, padding=1), (2, 4, 5, 6)),
    "2d, no bias, uneven kernel": (lambda: nn.Conv2d(4, 4, (3, 2), stride=(1, 2), bias=False), (2, 4, 7, 6)),
    "2d, same": (lambda: nn.Conv2d(8, 4, 3, padding="same", dilation=2), (1, 8, 6, 5)),
    "2d, circular": (lambda: nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"), (2, 4, 5, 5)),
    "2d, patches": (lambda: nn.Conv2d(3, 8, 4, stride=4), (2, 3, 8, 8)),
    "2d, without a batch": (lambda: nn.Conv2d(4, 8, 3), (4, 5, 6)),
    "3d": (lambda: nn.Conv3d(4, 8, 2, stride=(1, 2, 1), padding=1, dilation=(1, 1, 2)), (2, 4, 4, 5, 6)),
}


GRIDS = [(2, 1), (4, 1), (1, 2), (2, 2)]

# --- one operation


def own_part(module: Any, kind: Kind, mesh: Mesh) -> Any:
    """A copy of a convolution with this rank's part of its parameters."""
    part = copy.deepcopy(module)
    for leaf, parameter in module.named_parameters():
        part._parameters[leaf] = nn.Parameter(own(parameter.detach(), kind, leaf, mesh).clone())
    return part


def own(tensor: Tensor, kind: Kind, leaf: str, mesh: Mesh) -> Tensor:
    """Our part of a parameter (or its gradient), computed apart from weft."""
    outputs, inputs = ("y", "x") if kind == "row" else ("x", "y")
    tensor = tensor.tensor_split(mesh[outputs].degree, 0)[mesh[outputs].index]
    return tensor if leaf == "bias" else tensor.tensor_split(mesh[inputs].degree, 1)[mesh[inputs].index]


def differences(module: nn.Module, part: nn.Module, kind: Kind, mesh: Mesh) -> dict[str, float]:
    """How far the gradients of a part are from its part of the whole's."""
    found = {}
    for leaf, parameter in module.named_parameters():
        gradient = part.get_parameter(leaf).grad
        found[leaf] = float((gradient - own(parameter.grad, kind, leaf, mesh)).abs().max())
    return found


def told(mesh: Mesh) -> dict[tuple[str, str], tuple[int, int]]:
    return {key: (value.calls, value.num_bytes) for key, value in mesh.ledger.entries().items()}


def bytes_of(*calls: tuple[int, str, str, int]) -> dict[tuple[str, str], tuple[int, int]]:
    """The sum of calls (degree, axis, operation, elements) in float64, of which those of degree 1 are not made."""
    found: dict[tuple[str, str], tuple[int, int]] = {}
    for degree, axis, operation, numel in calls:
        if degree > 1:
            num_calls, num_bytes = found.get((axis, operation), (0, 0))
            found[axis, operation] = num_calls + 1, num_bytes + numel * 8
    return found


def mesh_of(x: int, y: int = 1) -> Mesh:
    torch.manual_seed(0)
    return Mesh(Plan(tensor=TensorPlan(x, y)))


def run_gathered(name: str, mesh: Mesh) -> dict[str, Any]:
    make, shape = CASES[name]
    torch.manual_seed(0)
    module: Any = make().double()
    value = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    expected = module(value)
    weights = torch.randn_like(expected)  # a loss that tells every output from every other
    (expected * weights).sum().backward()
    part, entered = own_part(module, "gathered", mesh), value.detach().clone().requires_grad_()
    mesh.ledger.clear()
    x, y = mesh["x"], mesh["y"]
    out = gathered(part, x, y, entered)
    (out * weights).sum().backward()
    assert entered.grad is not None
    assert value.grad is not None
    ours = value.numel() // module.in_channels * part.weight.shape[1]
    together = "all_reduce" if module.in_channels % y.degree else "all_gather"
    calls = bytes_of(
        (x.degree, "x", "all_gather", out.numel()),
        (x.degree, "x", "all_reduce", ours),
        (y.degree, "y", "all_reduce", out.numel() // x.degree),
        (y.degree, "y", together, value.numel()),
    )
    return {
        "shape": out.shape == expected.shape,
        "forward": float((out - expected).detach().abs().max()),
        "input": float((entered.grad - value.grad).abs().max()),
        **differences(module, part, "gathered", mesh),
        "traffic": told(mesh) == calls,
    }


def run_pair(mesh: Mesh, needs_gradient: bool = True) -> dict[str, Any]:
    torch.manual_seed(0)
    first = nn.Conv2d(4, 8, 3, stride=2, padding=1).double()
    second = nn.Conv2d(8, 6, 3, padding=2, dilation=2).double()
    value = torch.randn(2, 4, 9, 7, dtype=torch.float64, requires_grad=needs_gradient)
    inner = torch.nn.functional.gelu(first(value))
    expected = second(inner)
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    first_part, second_part = own_part(first, "column", mesh), own_part(second, "row", mesh)
    entered = value.detach().clone().requires_grad_(needs_gradient)
    x, y = mesh["x"], mesh["y"]
    mesh.ledger.clear()
    out = row(second_part, x, y, torch.nn.functional.gelu(column(first_part, x, y, entered)))
    (out * weights).sum().backward()
    found: dict[str, Any] = {"forward": float((out - expected).detach().abs().max())}
    if needs_gradient:
        found["input"] = float((entered.grad - value.grad).abs().max())
    for name, whole, part, kind in (("first", first, first_part, "column"), ("second", second, second_part, "row")):
        found |= {f"{name}.{leaf}": error for leaf, error in differences(whole, part, kind, mesh).items()}  # type: ignore[arg-type]
    calls = [
        (x.degree, "x", "all_reduce", out.numel() // y.degree),
        (y.degree, "y", "all_reduce", inner.numel() // x.degree),  # forward
        (y.degree, "y", "all_reduce", inner.numel() // x.degree),  # backward
        (y.degree, "y", "all_gather", out.numel()),
    ]
    if needs_gradient:
        calls += [
            (x.degree, "x", "all_reduce", value.numel() // y.degree),
            (y.degree, "y", "all_gather", value.numel()),
        ]
    found["traffic"] = told(mesh) == bytes_of(*calls)
    return found


def wrong(found: dict[str, Any]) -> list[str]:
    """What is not true, or not zero."""
    return [name for name, value in found.items() if value is False or (value is not True and not value < TOLERANCE)]


@pytest.mark.parametrize(("x", "y"), GRIDS)
def test_gathered_convolutions_are_the_whole_ones(x: int, y: int) -> None:
    def rank(_: int) -> dict[str, list[str]]:
        mesh = mesh_of(x, y)
        return {name: wrong(run_gathered(name, mesh)) for name in CASES}

    assert run_local(rank, x * y) == [{name: [] for name in CASES}] * (x * y)


@pytest.mark.parametrize(("x", "y"), GRIDS)
@pytest.mark.parametrize("needs_gradient", [True, False])
def test_pairs_are_the_whole_ones_and_say_nothing_over_x_in_between(x: int, y: int, needs_gradient: bool) -> None:
    assert run_local(lambda rank: wrong(run_pair(mesh_of(x, y), needs_gradient)), x * y) == [[]] * (x * y)


def test_one_rank_computes_the_convolution_itself() -> None:
    mesh = mesh_of(1)
    assert {name: wrong(run_gathered(name, mesh)) for name in CASES} == {name: [] for name in CASES}


def test_finds_an_input_gradient_that_is_not_summed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(convolution, "enter", lambda value, axis: value)
    assert run_local(lambda rank: wrong(run_gathered("2d", mesh_of(2))), 2) == [["input", "traffic"]] * 2
    assert run_local(lambda rank: wrong(run_pair(mesh_of(2))), 2) == [["input", "traffic"]] * 2


def test_finds_partial_sums_that_are_not_summed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(convolution, "leave", lambda value, axis: value)
    assert run_local(lambda rank: wrong(run_pair(mesh_of(2))), 2) == [["forward", "traffic"]] * 2
    assert "forward" in run_local(lambda rank: wrong(run_gathered("2d", mesh_of(1, 2))), 2)[0]


def test_finds_channels_that_are_gathered_along_another_dim(monkeypatch: Patch) -> None:
    monkeypatch.setattr(convolution, "_channel_dim", lambda module: 0)

    def rank(_: int) -> bool:
        module = nn.Conv2d(4, 8, 3, padding=1).double()
        mesh = mesh_of(2)
        out = gathered(
            own_part(module, "gathered", mesh), mesh["x"], mesh["y"], torch.randn(2, 4, 5, 6, dtype=torch.float64)
        )
        return tuple(out.shape) == (2, 8, 5, 6)

    assert run_local(rank, 2) == [False, False]


# --- models against themselves


def grid(x: int = 1, y: int = 1, shard: int = 1, data: int = 1, recompute: Recompute = "none", **others: Any) -> Plan:
    """A plan over the four axes; the stage of `shard` changes with the grid."""
    stage: Any = 1 + (x + y + data) % 3
    return Plan(data=data, shard=Shard(shard, stage), tensor=TensorPlan(x, y), memory=Memory(recompute), **others)


def check(name: str, plan: Plan, make: Callable[[], nn.Module] | None = None, steps: int = 2) -> ProofReport:
    """Verify the named model under a plan: loss, gradients, two steps; bytes; state."""
    return verify(make or MODELS[name], BATCHES.get(name, image_batch), plan, steps=steps)


COVERING: dict[str, tuple[str, Plan]] = {
    "x 2": ("plain", grid(2)),
    "x 2, no bias": ("no bias", grid(2, micro_batch=2)),
    "x 2, functions": ("classic", grid(2)),
    "x 2, GroupNorm": ("GroupNorm", grid(2, micro_batch=4)),
    "x 2, BatchNorm": ("BatchNorm", grid(2)),
    "x 2, patches": ("vit", grid(2)),
    "x 2, volumes": ("volumes", grid(2)),
    "x 2, full": ("GroupNorm", grid(2, recompute="full")),
    "x 2, full, chain": ("plain", grid(2, recompute="full")),
    "x 2, selective": ("text", grid(2, recompute="selective", micro_batch=2)),
    "x 4": ("plain", grid(4)),
    "x 4, patches, full": ("vit", grid(4, recompute="full")),
    "x 2 × shard 2": ("GroupNorm", grid(2, 1, 2, micro_batch=2)),
    "x 2 × shard 2, full": ("no bias", grid(2, 1, 2, recompute="full")),
    "x 2 × data 2": ("plain", grid(2, 1, 1, 2)),
    "x 2 × data 2, patches": ("vit", grid(2, 1, 1, 2, micro_batch=1)),
    "y 2": ("plain", grid(1, 2)),
    "y 2, functions": ("classic", grid(1, 2)),
    "y 2, BatchNorm": ("BatchNorm", grid(1, 2, recompute="full")),
    "y 2 × shard 2": ("text", grid(1, 2, 2)),
    "x 2 × y 2": ("GroupNorm", grid(2, 2)),
    "x 2 × y 2, patches": ("vit", grid(2, 2)),
    "x 2 × y 2, text": ("text", grid(2, 2, recompute="full", micro_batch=4)),
    "x 2 × y 2, volumes": ("volumes", grid(2, 2)),
}


@pytest.mark.parametrize(("name", "plan"), one_in(2, COVERING))
@pytest.mark.sampled(2)
def test_models(name: str, plan: Plan) -> None:
    check(name, plan).require()


def test_patches_with_a_split_sequence() -> None:
    check("vit", replace(grid(2), tensor=TensorPlan(2, 1, sequence=True))).require()
    check("vit", replace(grid(2, recompute="full"), tensor=TensorPlan(2, 2, sequence=True))).require()


def test_frozen_convolutions_say_less() -> None:
    def make() -> nn.Module:
        model = images.group_resnet()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name.startswith(("layer2", "fc")))
        return model

    for plan in (grid(2, recompute="full"), grid(2, 2)):
        check("", plan, make).require()


def test_images_that_need_a_gradient_are_put_together_from_uneven_parts() -> None:
    def behind() -> nn.Module:
        shift, inner = nn.Parameter(torch.zeros(3, 1, 1)), images.group_resnet()
        return net(lambda self, pixels: self.inner(pixels + self.shift), shift=shift, inner=inner)

    check("", grid(2, 2), behind).require()  # three channels over y = 2


def test_running_statistics_are_those_of_the_whole_model() -> None:
    def statistics(plan: Plan) -> dict[str, list[float]]:
        torch.manual_seed(0)
        model = parallelize(images.batch_resnet().double(), plan, Mesh(plan))
        for step in range(2):
            model(image_batch(step)[0].double())
        return {name: buffer.double().flatten().tolist() for name, buffer in model.named_buffers()}

    expected = statistics(Plan(precision="fp64"))
    assert any("running_var" in name for name in expected)
    for found in run_local(lambda rank: statistics(grid(2, 2, precision="fp64")), 4):
        assert found.keys() == expected.keys()
        for name, values in expected.items():
            assert found[name] == pytest.approx(values, rel=1e-10, abs=1e-12), name


def test_a_checkpoint_of_parts_is_that_of_the_whole_model(tmp_path: Path) -> None:
    def rank(_: int) -> list[str]:
        plan = grid(2, 2)
        torch.manual_seed(0)
        whole = images.batch_resnet()
        expected = copy.deepcopy(whole.state_dict())
        mesh = Mesh(plan)
        model = parallelize(whole, plan, mesh)
        saved = save(tmp_path, model, torch.optim.SGD(model.parameters()), mesh, 1)
        found = {entry.name: saved.read(entry.name, entry.kind) for entry in saved.entries()}
        return [name for name, value in expected.items() if name not in found or not torch.equal(found[name], value)]

    assert run_local(rank, 4) == [[]] * 4


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", [name for name in MODELS if name != "classic"])
@pytest.mark.parametrize(
    "ranks",
    [(2, 1, 1, 1), (4, 1, 1, 1), (1, 2, 1, 1), (2, 2, 1, 1), (2, 1, 2, 1), (2, 1, 1, 2), (1, 2, 2, 1), (2, 2, 2, 1)],
    ids=str,
)
def test_full_product(ranks: tuple[int, int, int, int], name: str, recompute: Recompute) -> None:
    if name == "BatchNorm" and ranks[2] * ranks[3] > 1:
        with pytest.raises(PlanError, match="takes statistics over the batch"):
            check(name, grid(*ranks))
        return
    check(name, grid(*ranks, recompute=recompute, micro_batch=2 if name != "BatchNorm" else None)).require()


# --- negative controls: in whole models, the bytes being right


def without_traffic(found: set[str]) -> bool:
    """Whether the ledger did not help to find it."""
    return not any(what.startswith("traffic") for what in found)


def test_finds_channels_that_are_cut_in_another_order(monkeypatch: Patch) -> None:
    cut = tensor_cuts._CutMaker.cut

    def turned(self: Any, name: str, shape: tuple[int, ...]) -> Any:
        found = cut(self, name, shape)
        if name != "conv1.weight":
            return found
        other = cut(tensor_cuts._CutMaker(self.pairing, self.plan, 1 - self.x, self.y), name, shape)
        return replace(found, intervals=other.intervals)

    monkeypatch.setattr(tensor_cuts._CutMaker, "cut", turned)
    found = failures(check("GroupNorm", grid(2), steps=1))
    assert "loss" in found
    assert without_traffic(found)


@pytest.mark.parametrize("name", ["plain", "GroupNorm"])
def test_finds_a_skipped_all_reduce_of_dI(monkeypatch: Patch, name: str) -> None:  # noqa: N802
    def backward(gradient: Tensor, over: Axis) -> Tensor:
        counted(over, "all_reduce", gradient)
        return gradient

    monkeypatch.setattr(tensor_ops, "_ENTER", replace(tensor_ops._ENTER, backward=backward))
    found = failures(check(name, grid(2)))
    assert "worst gradient" in found
    assert "loss" in found  # of the later steps
    assert without_traffic(found)


@pytest.mark.parametrize(("name", "plan"), [("plain", grid(2)), ("GroupNorm", grid(1, 2))])
def test_finds_a_skipped_sum_of_partial_results(monkeypatch: Patch, name: str, plan: Plan) -> None:
    def forward(value: Tensor, over: Axis) -> Tensor:
        counted(over, "all_reduce", value)
        return value.clone()

    monkeypatch.setattr(tensor_ops, "_LEAVE", replace(tensor_ops._LEAVE, forward=forward))
    found = failures(check(name, plan, steps=1))
    assert "loss" in found
    assert without_traffic(found)


def test_finds_results_that_recompute_is_thought_not_to_need(monkeypatch: Patch) -> None:
    original = profile

    def last(*given: Any, **options: Any) -> Any:
        found = original(*given, **options)
        calls = {name: tuple(replace(one, is_last=True) for one in own) for name, own in found.layer_calls.items()}
        return replace(found, layer_calls=calls, layers={name: own[-1] for name, own in calls.items()})

    monkeypatch.setattr(sys.modules[verify.__module__], "profile", last)
    assert failures(check("GroupNorm", grid(2, recompute="full"), steps=1)) == {"traffic: x all_gather"}


# --- bytes and memory by hand


def test_traffic_of_a_chain_by_hand() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 6, 1)
    )
    batch = 2
    found = profile(model, lambda: (torch.zeros(batch, 3, 9, 9),))
    inner, behind, out = batch * 8 * 7 * 7, batch * 4 * 3 * 3, batch * 6 * 3 * 3
    # The row's result; the lone one's result and its dI. Images need no gradient.
    assert sorted(traffic(found, grid(2), 0)) == sorted(
        [(("x", "all_reduce"), behind * 4), (("x", "all_gather"), out * 4), (("x", "all_reduce"), behind * 4)]
    )
    # Over y: the column's result and the row's dI of half of the inner channels each, the row's result gathered; the
    # lone one's result summed, its dI gathered.
    assert sorted(size for (axis, _), size in traffic(found, grid(2, 2), 0) if axis == "y") == sorted(
        [inner // 2 * 4, inner // 2 * 4, behind * 4, out // 2 * 4, behind * 4]
    )


def most_saved_bytes(make: Callable[[], nn.Module], plan: Plan) -> int:
    """What autograd saves on the rank that saves most, parameters and buffers aside."""

    def rank(_: int) -> int:
        model = parallelize(make(), plan, Mesh(plan))
        units = units_of(model)
        held = [flat.whole for flat in units.flats] if units is not None else [*model.parameters()]
        return saved_bytes([*held, *model.buffers()], lambda: CROSS_ENTROPY.total(model, image_batch(0)))

    return int(max(run_local(rank, plan.num_ranks)))


@pytest.mark.parametrize("name", ["plain", "classic", "GroupNorm"])
@pytest.mark.sampled(2)
def test_saved_bytes_are_as_predicted(name: str) -> None:
    pixels, labels = image_batch(0)
    plans = [grid(), grid(2), grid(4), grid(1, 2), grid(2, 2)]
    for plan in plans if name == "classic" else [*plans, grid(2, recompute="full"), grid(2, 2, recompute="full")]:
        found = profile(MODELS[name](), lambda: (torch.zeros_like(pixels),), lambda out: token_loss(out, labels))
        predicted = cost(found, plan, split_batch(plan, len(pixels), 1)).saved_bytes
        assert predicted == pytest.approx(most_saved_bytes(MODELS[name], plan), rel=0.04), plan.describe_axes()


# --- dropout


def test_ranks_of_x_drop_apart_between_a_column_and_a_row_and_alike_elsewhere() -> None:
    def rank(_: int) -> dict[str, Any]:
        torch.manual_seed(0)
        chain = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Dropout2d(0.5), nn.Conv2d(8, 8, 1), nn.Dropout(0.5), nn.Flatten())
        model = parallelize(chain.append(nn.Linear(512, 8)), grid(2), Mesh(grid(2)))
        masks: dict[str, list[bool]] = {}

        def watch(name: str, _: nn.Module, __: Any, out: Tensor) -> None:
            masks[name] = (out == 0).flatten().tolist()

        for name in ("1", "3"):
            model.get_submodule(name).register_forward_hook(partial(watch, name))
        torch.manual_seed(7)
        model(image_batch(0)[0])
        return {**masks, "after": torch.rand(()).item()}

    left, right = run_local(rank, 2)
    assert left["1"] != right["1"]
    assert left["3"] == right["3"]
    assert left["after"] == right["after"]


# --- refusals


def stem(conv: nn.Module, norm: nn.Module | None = None) -> nn.Module:
    """A convolution before the classifier."""
    return net(lambda self: None, conv1=conv, norm=norm, fc=nn.Linear(4, NUM_CLASSES))


def reason(model: nn.Module, plan: Plan) -> str:
    """Why a plan is refused."""
    with pytest.raises(PlanError) as error:
        refuse(profile(model), plan)
    return str(error.value)


ROW = nn.Sequential(nn.Conv2d(4, 6, 1), nn.ReLU(), nn.Conv2d(6, 5, 1))
PLAIN = "use a plain convolution with groups = 1, or tensor.x = tensor.y = 1 (`shard` splits the state of any layer)"


@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (
            stem(nn.Conv2d(3, 9, 3)),
            grid(2),
            "tensor.x = 2 does not divide the 9 output channels of 'conv1'; use 1, 3 or 9",
        ),
        (
            stem(nn.Conv2d(3, 1, 3)),
            grid(2),
            "tensor.x = 2 does not divide the 1 output channels of 'conv1'; use 1",
        ),
        (stem(ROW), grid(4), "tensor.x = 4 does not divide the 6 output channels of 'conv1.0'; use 1, 2, 3 or 6"),
        (stem(ROW), grid(2, 2), "tensor.y = 2 does not divide the 5 output channels of 'conv1.2'; use 1 or 5"),
        (
            stem(nn.Conv2d(1, 8, 3)),
            grid(1, 2),
            "tensor.y = 2 is more than the 1 input channels of 'conv1'; use at most 1",
        ),
        (
            stem(nn.Conv2d(4, 8, 3), nn.Embedding(8, 3)),
            grid(1, 2),
            "tensor.y = 2 does not divide the 3 features of 'norm'; use 1 or 3",
        ),
        (
            stem(nn.Conv1d(4, 4, 1, groups=4)),
            grid(1, 2),
            "tensor.y = 2 splits the features between layers, but not all layers can be ('conv1' is left whole: a "
            "convolution with groups = 4, whose outputs do not see every input); use y = 1",
        ),
        (
            stem(nn.LazyConv2d(8, 3)),
            grid(2),
            "'conv1.weight' is made when the model first runs; run a batch through the model before this",
        ),
        (
            images.group_resnet().layer1,
            replace(grid(2), tensor=TensorPlan(2, 1, sequence=True)),
            "tensor.sequence = true splits [batch, sequence, features] between blocks, but '0.conv1' is a convolution "
            "in a block, where dim 1 is not a sequence; use false",
        ),
    ],
)
def test_what_cannot_be_split_is_refused_by_name(model: nn.Module, plan: Plan, words: str) -> None:
    assert reason(model, plan) == words


def test_batch_norm_is_refused_where_the_batch_is_split() -> None:
    words = "layer 'bn1' takes statistics over the batch, which data = 2 splits"
    assert words in reason(images.batch_resnet(), grid(2, 1, 1, 2))
