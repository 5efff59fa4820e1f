"""1-bit and 0/1 Adam against one process with virtual workers, with and without shard; bytes, resuming, refusals."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import compressed_reference
import pytest
import torch
from compressed_reference import BLOCK, FREEZE, LOCAL, OPTIONS, Reference, compress, without_error
from runs_for_tests import make_run, train_on_ranks, write_run_file
from saving_for_tests import save, sent_and_predicted
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.checkpoint.folder import step_name
from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW, gradient_size
from weft.optim.gradient_size import GradientSize, block_squares
from weft.optim.one_bit_adam import OneBitAdam
from weft.optim.saved_state import load_state, weights_to_send
from weft.optim.sign_compression import SignCompressor, message_bytes, pack_signs, unpack_signs
from weft.optim.stepper import stepper
from weft.optim.zero_one_adam import ZeroOneAdam, sync_interval, variance_steps
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_flats, named_pieces, refresh
from weft.plan import Plan, Shard
from weft.sharding.layout import MASTER_DTYPE
from weft.step.options import refuse_options

STEPS, SAVED, CLIP = 17, 15, 0.4  # 0/1 Adam exchanges after steps 13 and 17
KINDS = {"1bit": (OneBitAdam, {}), "0/1": (ZeroOneAdam, LOCAL)}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_size, "BLOCK", BLOCK)


def test_signs_survive_packing_and_zero_is_plus() -> None:
    values = torch.tensor([[0.0, -0.0, -1e-30, 3, -2, 1, -1, 1]] * 3)
    assert torch.equal(unpack_signs(pack_signs(values)), torch.tensor([[1.0, 1, -1, 1, -1, 1, -1, 1]] * 3))


def test_the_errors_are_what_the_messages_left_out() -> None:
    """On one rank: the sum of all that was given is the sum of all results plus both errors."""
    torch.manual_seed(0)
    compressor = SignCompressor(13, Axis("data", 1, 0, None, Ledger()), torch.device("cpu"))
    weights = torch.rand(13) + 0.1
    weights[4] = 0
    given, results = torch.zeros(13), torch.zeros(13)
    for _ in range(50):
        vector = torch.randn(13)
        given += torch.where(weights > 0, vector, 0.0)
        results += compressor.mean(vector, weights)
    errors = compressor.worker_error + compressor.server_error[:13]
    assert torch.allclose(given, results + errors, atol=1e-4)
    assert results[4] == 0


def test_what_signs_leave_out_is_smaller_than_the_vector() -> None:
    """Also if few elements are much larger than the others, where the scale must not follow their squares."""
    vector = torch.full((64,), 0.01)
    vector[5] = -3.0
    compressor = SignCompressor(64, Axis("data", 1, 0, None, Ledger()), torch.device("cpu"))
    compressor.mean(vector, torch.ones(64))
    scale = vector.abs().mean()
    left = vector - scale * vector.sign()
    assert torch.allclose(compressor.worker_error, left)
    assert left.norm() < vector.norm()
    assert (vector - vector.square().mean().sqrt() * vector.sign()).norm() > vector.norm()  # the control


def test_when_0_1_adam_renews_and_synchronises() -> None:
    assert variance_steps(20, 2) == (1, 2, 3, 5, 7, 11, 15)
    assert [sync_interval(number, 5, 3, 4) for number in (5, 6, 8, 9, 12, 100)] == [1, 1, 1, 2, 4, 4]


def test_the_size_of_gradients_is_a_running_mean_by_block() -> None:
    """Corrected for its start at 0, so a constant size never changes, and one that jumps is followed in its block."""
    sizes = GradientSize(40, torch.device("cpu"))
    gradient = torch.ones(40)
    changes = [sizes.renew(block_squares(gradient), 0.9, count) for count in range(1, 6)]
    assert torch.stack(changes).allclose(torch.ones(5, 3))
    gradient[35:] = 3  # in the last block, of 8 elements: its mean square is now 6
    change = sizes.renew(block_squares(gradient), 0.9, 6)
    share = 0.1 / (1 - 0.9**6)
    assert change.tolist() == pytest.approx([1, 1, 1 + share * 5])
    assert sizes.spread(change).shape == (40,)
    several = GradientSize(40, torch.device("cpu"))
    for count in (1, 2):
        several.renew(block_squares(torch.ones(40)), 0.9, count)
    twice = several.renew(torch.full((3,), 2.0), 0.9, 4, num_steps=2)  # one mean of two steps
    assert twice.tolist() == pytest.approx([1 + (1 - 0.9**2) / (1 - 0.9**4)] * 3)
    none = GradientSize(
        40, torch.device("cpu")
    )  # as after a checkpoint of another layout: the first squares are its size
    assert none.renew(torch.full((3,), 7.0), 0.9, 50).tolist() == [1, 1, 1]
    assert none.renew(torch.full((3,), 7.0), 0.9, 51).tolist() == pytest.approx([1, 1, 1])


# --- ranks


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def batch(step: int, worker: int) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + worker))


def loss_of(model: nn.Module, step: int, worker: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (model(batch(step, worker).to(dtype)) ** 2).sum() / 10


def flat_of(flat: Any, tensors: dict[str, Tensor]) -> Tensor:
    """The whole flat buffer with these values."""
    whole = torch.zeros(flat.layout.numel, dtype=next(iter(tensors.values())).dtype)
    for parameter, start in zip(flat.layout.parameters, flat.layout.starts, strict=True):
        value = tensors[parameter.name].flatten()
        whole[start : start + len(value)] = value
    return whole


def build(kind: str, mesh: Mesh) -> tuple[nn.Module, OneBitAdam]:
    model = parallelize(make_model(), mesh.plan, mesh)
    cls, more = KINDS[kind]
    return model, cls(model, mesh["data"], **OPTIONS, **more)


def learning_rate(step: int) -> float:
    """It falls, so that errors of compression must not depend on the rate of the step that made them."""
    return float(OPTIONS["lr"] * 0.97**step)


def train(model: nn.Module, optimizer: AdamW, mesh: Mesh, steps: range, clip: float | None) -> None:
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step)
        loss_of(model, step, mesh["batch"].index, MASTER_DTYPE[mesh.plan.precision]).backward()
        stepper(optimizer).update(model, mesh, clip, None, None)
        optimizer.zero_grad()


def references(kind: str, mesh: Mesh, model: nn.Module, steps: int) -> list[tuple[Any, list[Reference]]]:
    """Every flat buffer after so many steps of all workers: a reference for each of its slices over shard."""
    return list(reference_steps(kind, mesh, model, steps))[-1]


def reference_steps(kind: str, mesh: Mesh, model: nn.Module, steps: int) -> Iterator[list[tuple[Any, list[Reference]]]]:
    """The references after each step."""
    workers, shard, dtype = mesh["data"].degree, mesh["shard"].degree, MASTER_DTYPE[mesh.plan.precision]
    values = dict(make_model().to(dtype).named_parameters())
    found = []
    for flat in all_flats(model):
        slices = flat_of(flat, values).detach().chunk(shard)
        decay = torch.full((flat.layout.slice_numel,), OPTIONS["weight_decay"], dtype=dtype)
        found.append((flat, [Reference(kind, one, decay, workers) for one in slices]))
    for step in range(steps):
        gradients = [_mean_gradients(found, step, worker, shard) for worker in range(workers)]
        for flat, own in found:
            wholes = [flat_of(flat, one).chunk(shard) for one in gradients]
            for index, reference in enumerate(own):
                reference.step([whole[index] for whole in wholes], step + 1, learning_rate(step))
        yield found


def _mean_gradients(found: list[tuple[Any, list[Reference]]], step: int, worker: int, shard: int) -> dict[str, Tensor]:
    """The gradients of a worker, which are means over the samples of its ranks of shard."""
    dtype = found[0][1][0].second.dtype
    plain = make_model().to(dtype)
    with torch.no_grad():
        for flat, own in found:
            whole = torch.cat([reference.weights[worker] for reference in own])
            for parameter, start in zip(flat.layout.parameters, flat.layout.starts, strict=True):
                target = plain.get_parameter(parameter.name)
                target.copy_(whole[start : start + target.numel()].view(target.shape))
    for index in range(shard):
        (loss_of(plain, step, worker * shard + index, dtype) / shard).backward()
    return {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_ranks_equal_virtual_workers_and_resume_exactly(kind: str, tmp_path: Path) -> None:
    def rank(index: int) -> list[int]:
        mesh = Mesh(Plan(data=2, exact=False))
        model, optimizer = build(kind, mesh)
        train(model, optimizer, mesh, range(SAVED), None)
        save(tmp_path, model, optimizer, mesh, SAVED)
        mesh.ledger.clear()
        train(model, optimizer, mesh, range(SAVED, STEPS), None)
        calls = {key[1]: (traffic.calls, traffic.num_bytes) for key, traffic in mesh.ledger if key[0] == "data"}
        for flat, (reference,) in references(kind, mesh, model, STEPS):
            error = (flat.slice - reference.weights[index]).abs().max()
            assert float(error) < 2e-6, (kind, error)
        wanted = [message_bytes(flat.layout.slice_numel, 2) for flat in all_flats(model)]
        num_exchanges = 1 if kind == "0/1" else STEPS - SAVED
        for name in ("all_to_all", "all_gather"):
            assert calls[name] == (num_exchanges * len(wanted), num_exchanges * sum(wanted))
        again, other = build(kind, mesh)
        load_state(Checkpoint(tmp_path / step_name(SAVED)), again, other)
        train(again, other, mesh, range(SAVED, STEPS), None)
        return [int(torch.equal(a.slice, b.slice)) for a, b in zip(all_flats(model), all_flats(again), strict=True)]

    assert all(all(found) for found in run_local(rank, 2))


@pytest.mark.processes
def test_the_mean_of_the_ranks_leaves_a_run_between_exchanges(tmp_path: Path) -> None:
    """To a checkpoint, a validator and an evaluation in training; the ranks themselves go on with what they had."""

    def rank(index: int) -> list[Any]:
        mesh = Mesh(Plan(data=2, exact=False))
        model, optimizer = build("0/1", mesh)
        train(model, optimizer, mesh, range(SAVED), None)
        own = {part.parameter.name: piece.detach().clone() for part, piece in named_pieces(model)}
        traffic = dict(mesh.ledger)
        sent = {piece.name: piece.tensor.tolist() for piece in weights_to_send(model, optimizer, mesh)}
        with stepper(optimizer).sharing_weights():
            inside = {part.parameter.name: piece.tolist() for part, piece in named_pieces(model)}
            evaluated = loss_of(model, 0, index).item()
        save(tmp_path, model, optimizer, mesh, SAVED)
        assert all(torch.equal(piece, own[part.parameter.name]) for part, piece in named_pieces(model))
        assert dict(mesh.ledger) == traffic
        return [{name: value.tolist() for name, value in own.items()}, sent, inside, evaluated]

    ranks = run_local(rank, 2)
    own = [{name: torch.tensor(value) for name, value in found.items()} for found, *_ in ranks]
    assert any(not torch.equal(own[0][name], own[1][name]) for name in own[0])
    means = {name: ((own[0][name].double() + own[1][name].double()) / 2).float() for name in own[0]}
    stored = Checkpoint(tmp_path / step_name(SAVED))
    reference = make_model()
    for name, mean in means.items():
        assert torch.equal(stored.read(name, "parameter").view(-1), mean.view(-1)), name
        assert [sent[name] for _, sent, _, _ in ranks if name in sent] == [mean.tolist()]
        assert all(inside[name] == mean.tolist() for _, _, inside, _ in ranks)
        reference.get_parameter(name).data.copy_(mean.view(reference.get_parameter(name).shape))
    for index, (*_, evaluated) in enumerate(ranks):
        assert evaluated == pytest.approx(loss_of(reference, 0, index).item(), rel=1e-6)


def test_what_goes_back_across_the_freeze_goes_on_as_what_is_loaded(tmp_path: Path) -> None:
    """A rollback loads into an optimizer that has made local steps already."""
    mesh, before = Mesh(Plan(precision="bf16", exact=False)), FREEZE - 2
    model, optimizer = build("0/1", mesh)
    train(model, optimizer, mesh, range(before), None)
    saved = save(tmp_path, model, optimizer, mesh, before)
    train(model, optimizer, mesh, range(before, SAVED), None)
    again, other = build("0/1", mesh)
    for one, its in ((model, optimizer), (again, other)):
        load_state(saved, one, its)
    for step in range(before, STEPS):
        for one, its in ((model, optimizer), (again, other)):
            train(one, its, mesh, range(step, step + 1), None)
        assert all(torch.equal(a.slice, b.slice) for a, b in zip(all_flats(model), all_flats(again), strict=True)), step


def test_state_that_is_forgotten_is_that_before_the_first_update() -> None:
    mesh = Mesh(Plan(precision="bf16", exact=False))
    (model, optimizer), (again, other) = build("0/1", mesh), build("0/1", mesh)
    train(model, optimizer, mesh, range(SAVED), None)
    for (_, piece), (_, fresh) in zip(named_pieces(model), named_pieces(again), strict=True):
        piece.detach().copy_(fresh)
        optimizer.forget_state(piece)
    refresh(model)
    for one, its in ((model, optimizer), (again, other)):
        train(one, its, mesh, range(STEPS), None)
    assert all(torch.equal(a.slice, b.slice) for a, b in zip(all_flats(model), all_flats(again), strict=True))


# --- resuming under another plan


def errors_of(model: nn.Module, optimizer: OneBitAdam, mesh: Mesh) -> list[Any]:
    """By kind and place: values of this rank's pieces; the place is (worker, parameter, first element)."""
    found = []
    for part, piece in named_pieces(model):
        if not piece.numel():
            continue
        for name, values in optimizer.read_own_state(piece).items():
            place = [mesh["data"].index, part.parameter.name, part.start]
            found.append([name.split("-")[0], *place, values.tolist()])
    return found


def by_element(ranks: list[list[Any]], num_workers: int) -> dict[str, list[dict[str, Tensor]]]:
    """By kind and worker: whole parameters."""
    found: dict[str, list[dict[str, Tensor]]] = {}
    sizes = {name: parameter.numel() for name, parameter in make_model().named_parameters()}
    for kind, worker, name, start, values in (one for rank in ranks for one in rank):
        workers = found.setdefault(kind, [{n: torch.zeros(s) for n, s in sizes.items()} for _ in range(num_workers)])
        workers[worker][name][start : start + len(values)] = torch.tensor(values)
    return found


def carried(found: dict[str, list[dict[str, Tensor]]], kind: str) -> Tensor:
    """The mean of a kind over workers, or the sum of the server's errors, of all elements."""
    workers = torch.stack([torch.cat(list(one.values())) for one in found[kind]]).double()
    return workers.sum(0) if kind == "server_error" else workers.mean(0)


@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_carried_over_to_any_plan(kind: str, tmp_path: Path) -> None:
    """In the middle of an interval: the same errors on as many workers, the same in total on others.

    After the next exchange all workers have the same weights.
    """
    before, plans = Plan(data=2, shard=Shard(2, 3), exact=False), [Plan(data=4, exact=False), Plan(data=2, exact=False)]

    def rank(index: int) -> list[Any]:
        mesh = Mesh(before)
        model, optimizer = build(kind, mesh)
        train(model, optimizer, mesh, range(SAVED), None)
        save(tmp_path, model, optimizer, mesh, SAVED)
        return errors_of(model, optimizer, mesh)

    saved = by_element(run_local(rank, 4), 2)
    for plan in plans:

        def resume(_: int, plan: Plan = plan) -> list[Any]:
            mesh = Mesh(plan)
            model, optimizer = build(kind, mesh)
            load_state(Checkpoint(tmp_path / step_name(SAVED)), model, optimizer)
            errors = errors_of(model, optimizer, mesh)
            train(model, optimizer, mesh, range(SAVED, STEPS), None)
            return [errors, [flat.slice.tolist() for flat in all_flats(model)]]

        ranks = run_local(resume, plan.num_ranks)
        assert all(weights == ranks[0][1] for _, weights in ranks)
        loaded = by_element([errors for errors, _ in ranks], plan.data)
        assert loaded.keys() == saved.keys()
        for name in loaded.keys() - {"gradient_size", "square_sum", "square_count"}:  # these are by block
            assert torch.allclose(carried(loaded, name), carried(saved, name), rtol=1e-6, atol=1e-9), name
            assert carried(saved, name).abs().max() > 0, name
            if plan.data == 2 and name != "server_error":
                assert all(torch.equal(a[n], b[n]) for a, b in zip(loaded[name], saved[name], strict=True) for n in a)
        sizes = carried(loaded, "gradient_size")
        assert (sizes > 0).all()
        assert torch.allclose(sizes.mean(), carried(saved, "gradient_size").mean(), rtol=0.2)


@pytest.mark.soak
@pytest.mark.processes
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("data", "shard"), [(2, 1), (3, 1), (2, 2), (1, 2)])
def test_a_hundred_steps_equal_virtual_workers(kind: str, data: int, shard: int) -> None:
    """In float64, with and without shard. The control leaves out the errors of the workers, and must differ.

    In float32 the two differ after some steps, because rounding decides the sign of values near 0.
    """

    def rank(_: int) -> list[float]:
        mesh = Mesh(Plan(data=data, shard=Shard(shard, 3), precision="fp64", exact=False))
        right = largest_difference(kind, mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compressed_reference, "compress", partial(without_error, compress))
            return [right, largest_difference(kind, mesh)]

    for right, wrong in run_local(rank, data * shard, 500.0):
        assert right < 1e-9
        assert wrong > 1e-3


def largest_difference(kind: str, mesh: Mesh) -> float:
    """Of this rank's weights from the reference's, in 100 steps."""
    model, optimizer = build(kind, mesh)
    worker, index, worst = mesh["data"].index, mesh["shard"].index, 0.0
    for step, found in enumerate(reference_steps(kind, mesh, model, 100)):
        train(model, optimizer, mesh, range(step, step + 1), None)
        error = max(float((flat.slice - own[index].weights[worker]).abs().max()) for flat, own in found)
        worst = max(worst, error)
    return worst


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_of_one_sends_nothing_and_learns(kind: str) -> None:
    """In bf16 with master weights. Each update changes weights, also those between exchanges and without variance."""
    mesh = Mesh(Plan(precision="bf16", exact=False))
    model, optimizer = build(kind, mesh)
    before, losses = [flat.slice.clone() for flat in all_flats(model)], []
    for step in range(STEPS):
        loss = loss_of(model, step % 2, 0)
        losses.append(loss.item())
        loss.backward()
        stepper(optimizer).update(model, mesh, CLIP, None, None)
        optimizer.zero_grad()
        after = [flat.slice.clone() for flat in all_flats(model)]
        assert not any(map(torch.equal, before, after)), step
        before = after
    assert losses[-1] < 0.5 * losses[1]
    assert dict(mesh.ledger) == {}
    plain = Mesh(Plan(exact=False))
    with pytest.raises(PlanError, match=r"one rank and one precision.*use torch\.optim\.AdamW"):
        build(kind, plain)


@pytest.mark.processes
def test_before_the_freeze_it_is_adamw_with_clipping() -> None:
    def rank(_: int) -> list[bool]:
        mesh = Mesh(Plan(data=2, exact=False))
        model, optimizer = build("1bit", mesh)
        train(model, optimizer, mesh, range(FREEZE), CLIP)
        plain = parallelize(make_model(), mesh.plan, mesh)
        train(
            plain, AdamW(plain, **{k: v for k, v in OPTIONS.items() if k != "freeze_step"}), mesh, range(FREEZE), CLIP
        )
        same = [torch.equal(a.slice, b.slice) for a, b in zip(all_flats(model), all_flats(plain), strict=True)]
        train(model, optimizer, mesh, range(FREEZE, FREEZE + 2), CLIP)  # clipped by one norm: ranks stay equal
        return [*same, *(bool(flat.slice.isfinite().all()) for flat in all_flats(model))]

    assert all(all(found) for found in run_local(rank, 2))


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


ONE_BIT = ["plan.exact=false", "plan.data=2", 'train.compressed={kind="1bit", freeze_step=2}']


@pytest.mark.processes
def test_a_run_beside_shard_resumes_and_sends_what_was_predicted(run_file: Path) -> None:
    given = [*ONE_BIT, "plan.shard=2", "train.steps=5", "train.profile=3:5", "checkpoint.every=3"]
    run = make_run(run_file, "run", *given)
    assert train_on_ranks(run)["finished"]
    sent, predicted = sent_and_predicted(run, 5)
    assert sent == predicted


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["plan.exact=true"], "plan.exact = true; set plan.exact = false"),
        (["plan.data=1"], "plan.data = 1; leave it out"),
        (["plan.pipe=2", "plan.micro_batch=4"], "not built for pipelines"),
        (["plan.memory.state=bf16"], "keeps its state in the master dtype"),
        (["numbers.compare_every=2"], "leave numbers.compare_every out"),
    ],
)
def test_refusals(run_file: Path, overrides: list[str], words: str) -> None:
    with pytest.raises(PlanError, match=words):
        refuse_options(make_run(run_file, "run", *ONE_BIT, *overrides))
