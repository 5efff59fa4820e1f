"""K-FAC: factors and updates against direct computation, ranks against one process, bytes, resuming, refusals."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kfac_for_tests import (
    SAMPLES,
    SAVED,
    STEPS,
    batch,
    build,
    difference,
    make_kfac,
    make_model,
    predicted,
    reference,
    save,
    traffic_of,
    train,
    values,
)
from runs_for_tests import events, make_run, train_on_ranks, write_run_file
from saving_for_tests import sent_and_predicted
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.checkpoint.folder import step_name
from weft.comm import Pending, add_traffic
from weft.errors import CheckpointError, ConfigError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW, kfac, kfac_ranks, kfac_sub_grid
from weft.optim.kfac import KFAC
from weft.optim.kfac_layers import find_layers
from weft.optim.kfac_placement import owners_of
from weft.optim.kfac_sub_grid import RETRIES, damped_inverses
from weft.optim.saved_state import load_state
from weft.optim.stepper import stepper
from weft.parallel.apply import parallelize
from weft.parallel.model_state import state_bytes
from weft.plan import Plan
from weft.run_tables import Kfac
from weft.step.options import refuse_options


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def sampled(model: nn.Module, options: Kfac, given: Tensor, labels: Tensor, parts: int = 1) -> KFAC:
    """K-FAC after a step on the mean cross-entropy, in `parts` micro-batches."""
    optimizer = make_kfac(model, options=options, decay=0.0)
    stepper(optimizer).begin(torch.tensor(float(len(labels))))
    for one, label in zip(given.chunk(parts), labels.chunk(parts), strict=True):
        (nn.functional.cross_entropy(model(one), label, reduction="sum") / len(labels)).backward()
    optimizer.step()
    return optimizer


# --- against direct computation

CONVOLUTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride and padding": {"stride": (2, 1), "padding": (1, 2)},
    "groups": {"groups": 2, "stride": 2},
    "depthwise, no bias": {"groups": 4, "padding": 1, "bias": False},
    "same, dilated": {"padding": "same", "dilation": 2},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
}


@pytest.mark.parametrize("options", CONVOLUTIONS.values(), ids=CONVOLUTIONS.keys())
def test_factors_of_a_convolution_equal_sums_over_its_outputs(options: dict[str, Any]) -> None:
    """The input of an output pixel is read off the convolution itself: its derivative by the weight."""
    torch.manual_seed(1)
    conv = nn.Conv2d(4, 4, 3, **options)
    model = nn.Sequential(conv, nn.Flatten(), nn.LazyLinear(3))
    given, labels = torch.randn(3, 4, 5, 6), torch.tensor([0, 2, 1])
    model(given)
    before = deepcopy(model)
    one = sampled(model, Kfac(factor_every=1, exclude=("2",)), given, labels, parts=3).states[0]
    layer, factors, (conv, _, head) = one.layer, one.factors, before
    assert factors is not None
    first, second, num_rows = torch.zeros(layer.input_shape), torch.zeros(layer.output_shape), 0
    for image, label in zip(given, labels, strict=True):
        output = conv(image[None])
        loss = nn.functional.cross_entropy(head(output.flatten(1)), label[None])
        (gradients,) = torch.autograd.grad(loss, output, retain_graph=True)
        per_group = 4 // conv.groups
        for y in range(output.shape[2]):
            for x in range(output.shape[3]):
                num_rows += 1
                for group in range(conv.groups):
                    pixel = output[0, group * per_group, y, x]
                    names = {"weight": conv.weight, **({"bias": conv.bias} if conv.bias is not None else {})}
                    found = torch.autograd.grad(pixel, list(names.values()), retain_graph=True)
                    row = torch.cat([g[group * per_group].flatten() for g in found])
                    gradient = gradients[0, group * per_group : (group + 1) * per_group, y, x]
                    first[group] += row.outer(row)
                    second[group] += gradient.outer(gradient)
    torch.testing.assert_close(factors[0], first / num_rows, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(factors[1], second / len(labels), rtol=1e-10, atol=1e-12)
    assert not torch.allclose(factors[1], second / num_rows)  # the number of targets is no number of rows


@pytest.mark.parametrize("has_bias", [True, False])
def test_an_update_of_a_linear_solves_the_kronecker_system(has_bias: bool) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4 + has_bias, bias=has_bias))  # square, so that sides could be swapped
    given, labels = torch.randn(7, 4), torch.randint(0, 4, (7,))
    before = deepcopy(model)
    logits = before(given)
    logits.retain_grad()
    nn.functional.cross_entropy(logits, labels, reduction="sum").backward()
    gradients = [one.grad / 7 for one in before.parameters() if one.grad is not None]
    sampled(model, Kfac(learning_rate=0.3, damping=0.02, kl_clip=torch.inf), given, labels)
    rows = torch.cat([given, torch.ones(7, 1)], 1) if has_bias else given
    first, second = rows.T @ rows / 7, logits.grad.T @ logits.grad / 7
    pi = ((first.trace() / len(first)) / (second.trace() / len(second))).sqrt()
    first = first + pi * 0.02**0.5 * torch.eye(len(first))
    second = second + 0.02**0.5 / pi * torch.eye(len(second))
    whole = torch.cat([gradients[0], gradients[1][:, None]], 1) if has_bias else gradients[0]
    solved = torch.linalg.solve(torch.kron(second, first), whole.flatten()).view(whole.shape)
    change = torch.cat(
        [(s - p).view(len(whole), -1) for s, p in zip(before.parameters(), model.parameters(), strict=True)], 1
    )
    torch.testing.assert_close(change, 0.3 * solved, rtol=1e-9, atol=1e-12)
    swapped = torch.linalg.solve(torch.kron(first, second), whole.flatten()).view(whole.shape)
    assert not torch.allclose(change, 0.3 * swapped, rtol=1e-3)


@pytest.mark.parametrize(("damping", "lands"), [(1e-24, True), (1.0, False)])
def test_one_step_lands_on_the_least_squares_solution(damping: float, lands: bool) -> None:
    """G of half the squared error is the identity, its Gauss-Newton block; the step is that of Newton."""
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(5, 2))
    given, targets = torch.randn(20, 5), torch.randn(20, 2)
    options = Kfac(learning_rate=1.0, damping=damping, kl_clip=torch.inf)
    optimizer = make_kfac(model, options=options, decay=0.0)
    optimizer.begin(torch.tensor(20.0))
    ((model(given) - targets) ** 2 / 2).sum(1).mean().backward()

    def with_identity(first: Tensor, second: Tensor, damping: float) -> Any:
        return damped_inverses(first, torch.eye(second.shape[-1]).expand_as(second), damping)

    with patch.object(kfac_sub_grid, "damped_inverses", with_identity):
        optimizer.step()
    rows = torch.cat([given, torch.ones(20, 1)], 1)
    solution = torch.linalg.lstsq(rows, targets).solution.T
    found = torch.cat([model[0].weight, model[0].bias[:, None]], 1)
    assert torch.allclose(found, solution, rtol=1e-8, atol=1e-9) == lands


def test_a_singular_factor_needs_damping_and_an_indefinite_one_is_retried() -> None:
    singular, identity = torch.ones(1, 3, 3), torch.eye(3)[None]
    assert damped_inverses(singular, identity, 0.0) is None
    found = damped_inverses(singular, identity, 1e-2)
    assert found[2] == 1e-2
    torch.testing.assert_close(found[0][0] @ (singular[0] + 0.1 * torch.eye(3)), torch.eye(3))
    indefinite = torch.diag(torch.tensor([3.0, 1.0, -0.5]))[None]
    retried = damped_inverses(indefinite, identity, 1e-2)
    assert retried[2] == pytest.approx(1.0)
    assert damped_inverses(indefinite * 10.0 ** (2 * RETRIES), identity, 1e-9) is None
    assert damped_inverses(singular * torch.nan, identity, 1.0) is None


def test_layers_that_are_left_to_adamw() -> None:
    model = make_model()
    names = {name for name, one in model.named_parameters() if one.requires_grad}
    assert [layer.name for layer in find_layers(model, names)] == ["0", "4", "7"]
    assert [layer.name for layer in find_layers(model, names, ["7", "x*"], max_size=20)] == ["0"]
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    assert find_layers(tied, {"0.weight", "0.bias", "1.bias"}) == []
    with pytest.raises(PlanError, match="no trained linear or convolution"):
        make_kfac(tied)


def test_a_bad_step_changes_nothing_and_a_layer_that_was_not_called_is_named() -> None:
    model = make_model()
    optimizer, (images, labels) = make_kfac(model), batch(0)
    mesh = Mesh(Plan())
    stepper(optimizer).begin(torch.tensor(float(SAMPLES)))
    (nn.functional.cross_entropy(model(images), labels) * torch.nan).backward()
    before = [one.detach().clone() for one in model.parameters()]
    stepper(optimizer).update(model, mesh, None, None, None)
    optimizer.zero_grad()
    assert optimizer.num_updates == 0
    assert all(torch.equal(*pair) for pair in zip(before, model.parameters(), strict=True))
    assert all(not factor.any() for one in optimizer.states for factor in one.factors or ())
    stepper(optimizer).begin(torch.tensor(float(SAMPLES)))
    model[:5](images).sum().backward()
    with pytest.raises(PlanError, match=r"no input of layer '7'.*train\.kfac\.exclude"):
        stepper(optimizer).update(model, mesh, None, None, None)


# --- ranks


def check_bytes(mesh: Mesh, model: nn.Module, optimizer: KFAC) -> None:
    """Of three steps: one that samples and inverts, one that does neither, one that only samples."""
    adamw = parallelize(make_model(), mesh.plan, mesh)
    mesh.ledger.clear()
    train(adamw, AdamW(adamw), mesh, range(1))
    plain = traffic_of(mesh)
    more, state = predicted(mesh, model, optimizer)
    operation = "all_reduce" if optimizer.options.mode == "inline" else "reduce_scatter"
    samples = {("data", operation): more["data", operation]}
    for step, extra in enumerate((more, {}, samples)):
        train(model, optimizer, mesh, range(step, step + 1))
        assert {key: (one.calls, one.num_bytes) for key, one in traffic_of(mesh).items()} == {
            key: (one.calls, one.num_bytes) for key, one in add_traffic(plain, extra).items()
        }
    largest = torch.tensor([float(state_bytes(model, optimizer)["optimizer"])])
    kfac_ranks.all_reduce(largest, mesh["data"], "max").wait()
    assert largest.item() == state


@pytest.mark.processes
def test_ranks_equal_one_process_and_resume_under_any_other_degree(tmp_path: Path) -> None:
    """Inline and owner-sharded, at 2 ranks and at 4, which resume what 2 ranks and 4 ranks saved."""
    wanted = reference()

    def rank(index: int) -> list[float]:
        degree = torch.distributed.get_world_size()
        mesh, found = Mesh(Plan(data=degree, exact=False, precision="fp64")), []
        for mode in ("inline", "owner-sharded"):
            model, optimizer = build(mesh, mode)
            train(model, optimizer, mesh, range(SAVED))
            save(tmp_path / f"{mode}-{degree}", mesh, model, optimizer)
            train(model, optimizer, mesh, range(SAVED, STEPS))
            found.append(difference(values(model), wanted))
            again, other = build(mesh, mode)
            load_state(Checkpoint(tmp_path / f"{mode}-{degree}" / step_name(SAVED)), again, other)
            train(again, other, mesh, range(SAVED, STEPS))
            assert difference(values(again), values(model)) == 0
            check_bytes(mesh, *build(mesh, mode))
        if degree == 4:
            for mode, saved in (("inline", "owner-sharded-2"), ("owner-sharded", "inline-2")):
                model, optimizer = build(mesh, mode)
                load_state(Checkpoint(tmp_path / saved / step_name(SAVED)), model, optimizer)
                train(model, optimizer, mesh, range(SAVED, STEPS))
                found.append(difference(values(model), wanted))
            adamw = parallelize(make_model(), mesh.plan, mesh)
            with pytest.raises(CheckpointError, match=r"K-FAC's state.*train\.kfac is not set"):
                load_state(Checkpoint(tmp_path / "inline-2" / step_name(SAVED)), adamw, AdamW(adamw))
        for mode, name in (("inline", "all_reduce"), ("owner-sharded", "reduce_scatter")):  # controls
            model, optimizer = build(mesh, mode)
            with patch.object(kfac_ranks, name, without_sending):
                train(model, optimizer, mesh, range(STEPS))
            assert difference(values(model), wanted) > 1e-6
        return found

    for degree in (2, 4):
        for found in run_local(rank, degree):
            assert max(found) < 1e-9
    whole = make_model()
    optimizer, mesh = make_kfac(whole), Mesh(Plan())
    load_state(Checkpoint(tmp_path / "owner-sharded-4" / step_name(SAVED)), whole, optimizer)
    train(whole, optimizer, mesh, range(SAVED, STEPS))
    assert difference(values(whole), wanted) < 1e-9


def without_sending(result: Tensor, *given: Any) -> Pending:
    """Leaves out a sum over ranks: a rank uses what it has, times the number of ranks."""
    axis = given[-1]
    if len(given) == 2:
        result.copy_(given[0].view(axis.degree, -1)[axis.index])
    result.mul_(axis.degree)
    return Pending(None, axis, "none")


def test_state_of_adamw_lets_k_fac_begin_anew(caplog: pytest.LogCaptureFixture) -> None:
    model = make_model()
    optimizer, mesh = make_kfac(model), Mesh(Plan())
    train(model, optimizer, mesh, range(3))
    steps = stepper(optimizer)
    for name, piece in model.named_parameters():
        moments = torch.full_like(piece, 0.5)
        steps.write_state(name, piece, {"step": torch.tensor(3.0), "exp_avg": moments, "exp_avg_sq": moments})
    steps.finish_writing(lambda name, kind: torch.tensor(3.0) if kind == "step" else None)
    assert "no state of K-FAC" in caplog.text
    assert optimizer.num_updates == 0
    norm, weight = model[1].weight, model[4].weight
    assert float(optimizer.state[norm]["step"]) == 3
    assert not optimizer.state[weight][kfac.MOMENTUM].any()
    train(model, optimizer, mesh, range(3))  # samples at once, and its first sample is the average


def test_owners_share_the_work() -> None:
    model = nn.Sequential(*[nn.Linear(size, size, bias=False) for size in (8, 7, 6, 5, 2)])
    layers = find_layers(model, {name for name, _ in model.named_parameters()})
    assert owners_of(layers, 2) == (0, 1, 1, 0, 1)


# --- runs


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    torch.set_default_dtype(torch.float32)
    return write_run_file(tmp_path)


KFAC_RUN = ["plan.exact=false", "plan.data=2", "train.kfac={inverse_every=2}"]


@pytest.mark.processes
def test_a_run_sends_what_was_predicted_and_logs_statistics(run_file: Path) -> None:
    run = make_run(run_file, "run", *KFAC_RUN, "train.steps=5", "train.profile=3:5", "checkpoint.every=3")
    assert train_on_ranks(run)["finished"]
    sent, predicted = sent_and_predicted(run, 5)
    assert predicted.keys() == {("data", one) for one in ("all_reduce", "reduce_scatter", "all_gather")}
    assert sent == predicted
    logged = events(run.folder, "kfac")
    assert [event["step"] for event in logged] == [1, 3, 5]
    assert all(event["input"] > 0 and event["output"] > 0 and event["kept"] == 0 for event in logged)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.exact=true"], r"plan\.exact = true; set plan\.exact = false"),
        (["plan.shard=2"], r"needs whole gradients on each rank, and plan\.shard\.stage = 3"),
        (["plan.shard={degree=2, stage=2}"], r"plan\.shard\.stage = 2 keeps slices; set plan\.shard\.stage = 1"),
        (["plan.tensor.x=2"], r"beside data and shard, and plan\.tensor\.x = 2"),
        (["plan.pipe=2", "plan.micro_batch=4"], r"beside data and shard, and plan\.pipe\.degree = 2"),
        (["plan.memory.state=bf16"], "keeps its state in the master dtype"),
        (["plan.memory.recompute=full"], r"not built for plan\.memory\.recompute = 'full'"),
        (["train.compile=true"], r"not built for train\.compile"),
        (["numbers.repeat_every=2", "train.deterministic=true"], r"not built for numbers\.repeat_every"),
    ],
)
def test_refusals(run_file: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse_options(make_run(run_file, "run", *KFAC_RUN, *overrides))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"damping": 0.0}, r"train\.kfac\.damping = 0\.0"),
        ({"decay": 1.0}, r"train\.kfac\.decay = 1\.0"),
        ({"factor_every": 3, "inverse_every": 10}, "not a multiple of factor_every = 3"),
        ({"kl_clip": 0.0}, "greater than 0, inf"),
        ({"max_size": 0}, r"train\.kfac\.max_size"),
    ],
)
def test_bad_options(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        Kfac(**given)
