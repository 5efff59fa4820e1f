"""K-FAC beside `shard` stage 1: equal to one process, bytes and state as predicted, checkpoints to and from any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kfac_for_tests import (
    SAVED,
    STEPS,
    build,
    difference,
    make_kfac,
    make_model,
    predicted,
    reference,
    save,
    traffic_of,
    train,
)
from runs_for_tests import make_run, train_on_ranks, write_run_file
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.checkpoint.folder import step_name
from weft.comm import Axis, Pending, add_traffic, all_reduce
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim import AdamW, kfac_ranks
from weft.optim.saved_state import load_state
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_flats, named_pieces, state_bytes
from weft.plan import Plan, Shard
from weft.planner.predict import predict, run_cluster
from weft.recording.rank_file import read_recording

pytestmark = pytest.mark.processes
MODES = ("inline", "owner-sharded", "sub-grid")


@pytest.fixture(autouse=True)
def _in_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def mesh_of(data: int, shard: int) -> Mesh:
    return Mesh(Plan(data=data, shard=Shard(shard, 1), exact=False, precision="fp64"))


def wrong_by(model: nn.Module, wanted: list[Tensor]) -> float:
    """The largest difference of this rank's slices from the parameters of one process."""
    by_name = dict(zip((name for name, _ in make_model().named_parameters()), wanted, strict=True))
    parts = [(piece.detach().flatten(), part) for part, piece in named_pieces(model)]
    pairs = [(own, by_name[part.parameter.name][part.start : part.stop]) for own, part in parts]
    return difference([one for one, _ in pairs], [other for _, other in pairs]) if pairs else 0.0


def check_bytes(mesh: Mesh, mode: str) -> None:
    """Of three steps: one that samples and renews, one that does neither, and one that only samples."""
    model, optimizer = build(mesh, mode)
    adamw = parallelize(make_model(), mesh.plan, mesh)
    mesh.ledger.clear()
    train(adamw, AdamW(adamw), mesh, range(1))
    plain = traffic_of(mesh)
    more, state = predicted(mesh, model, optimizer)
    layouts = [flat.layout for flat in all_flats(model) if flat.trainable]
    own = {name for one in optimizer.states for name in one.layer.parameter_names}
    gathered = [one.numel * 8 for one in kfac_ranks.gathered_layouts(layouts, own)]
    train(model, optimizer, mesh, range(1))
    first = traffic_of(mesh)
    train(model, optimizer, mesh, range(1, 2))
    second = traffic_of(mesh)
    assert first == add_traffic(plain, more)
    key = ("shard", "all_gather")
    assert {**second, key: second[key].num_bytes} == {**plain, key: plain[key].num_bytes + sum(gathered)}
    largest = torch.tensor([float(state_bytes(model, optimizer)["optimizer"])])
    for axis in (mesh["data"], mesh["shard"]):
        all_reduce(largest, axis, "max").wait()
    assert largest.item() == state


def unsent(result: Tensor, *given: Any) -> Pending:
    """Leaves out a collective. A sum is that of this rank, times the number of ranks."""
    axis = next(one for one in given if isinstance(one, Axis))
    if given[0] is not axis:
        result.copy_(given[0].view(axis.degree, -1)[axis.index])
    result.mul_(axis.degree)
    return Pending(None, axis, "none")


def not_gathered(whole: Tensor, part: Tensor, axis: Axis) -> Pending:
    """Leaves out the gather of gradients."""
    return Pending(None, axis, "none")


def only_shard(name: str) -> Callable[..., Pending]:
    """A collective of `kfac_ranks` that is left out over `shard` alone."""
    real = getattr(kfac_ranks, name)
    return lambda *given: unsent(*given) if any(getattr(one, "name", "") == "shard" for one in given) else real(*given)


@pytest.mark.parametrize(("data", "shard"), [(2, 2), (1, 2), (2, 4)])
def test_ranks_equal_one_process(data: int, shard: int) -> None:
    wanted = reference()

    def rank(index: int) -> None:
        mesh = mesh_of(data, shard)
        for mode in MODES:
            model, optimizer = build(mesh, mode)
            train(model, optimizer, mesh, range(STEPS))
            assert wrong_by(model, wanted) < 1e-9, mode
            check_bytes(mesh, mode)
        controls = [(kfac_ranks, "all_reduce", only_shard("all_reduce"), "inline")]
        controls += [(kfac_ranks, "reduce_scatter", only_shard("reduce_scatter"), "owner-sharded")]
        controls += [(kfac_ranks, "all_gather", not_gathered, "inline")]
        for module, name, instead, mode in controls:
            model, optimizer = build(mesh, mode)
            with patch.object(module, name, instead):
                train(model, optimizer, mesh, range(STEPS))
            wrong = torch.tensor([wrong_by(model, wanted)])
            all_reduce(wrong, mesh["shard"], "max").wait()
            assert wrong.item() > 1e-6, name

    run_local(rank, data * shard)


@pytest.mark.parametrize(("data", "shard"), [(2, 2), (1, 4), (2, 1)])
def test_checkpoints_go_from_any_plan_to_any(tmp_path: Path, data: int, shard: int) -> None:
    """From shard 2, data 2 × shard 2 and plain data 4, to all modes under other plans and to one process."""
    wanted = reference()
    plans = {"shard-2": (1, 2, "owner-sharded"), "both": (2, 2, "inline"), "plain": (4, 1, "owner-sharded")}

    def saves(index: int, name: str) -> None:
        *degrees, mode = plans[name]
        mesh = mesh_of(*degrees)
        model, optimizer = build(mesh, mode)
        train(model, optimizer, mesh, range(SAVED))
        save(tmp_path / name, mesh, model, optimizer)

    def resumes(index: int) -> None:
        mesh = mesh_of(data, shard)
        for name in plans:
            for mode in MODES:
                model, optimizer = build(mesh, mode)
                load_state(Checkpoint(tmp_path / name / step_name(SAVED)), model, optimizer)
                assert optimizer.num_updates == SAVED
                train(model, optimizer, mesh, range(SAVED, STEPS))
                assert wrong_by(model, wanted) < 1e-9, (name, mode)

    for name, (first, second, _) in plans.items():
        run_local(partial(saves, name=name), first * second)
    run_local(resumes, data * shard)
    for name in plans:
        whole = make_model()
        optimizer = make_kfac(whole)
        load_state(Checkpoint(tmp_path / name / step_name(SAVED)), whole, optimizer)
        train(whole, optimizer, Mesh(Plan()), range(SAVED, STEPS))
        assert wrong_by(whole, wanted) < 1e-9


def test_stages_2_and_3_are_refused() -> None:
    def rank(index: int) -> None:
        for stage in (2, 3):
            mesh = Mesh(Plan(shard=Shard(2, stage), exact=False, precision="fp64"))
            with pytest.raises(PlanError, match=r"whole gradients on the device; set plan\.shard\.stage to 1"):
                build(mesh, "inline")

    run_local(rank, 2)


def test_a_run_sends_and_keeps_what_was_predicted(tmp_path: Path) -> None:
    torch.set_default_dtype(torch.float32)
    kfac = ["plan.exact=false", "plan.shard={degree=2, stage=1}", "train.kfac={inverse_every=2}"]
    run = make_run(write_run_file(tmp_path), "run", *kfac, "train.steps=3", "train.profile=2:3")
    assert train_on_ranks(run)["finished"]
    counted: dict[tuple[str, str], list[int]] = {}
    for call in read_recording(run.folder)[0].calls:
        if call.step == 3 and call.axis == "shard":
            counted.setdefault((call.axis, call.operation), []).append(call.num_bytes)
    found = {key: (len(sizes), sum(sizes)) for key, sizes in counted.items()}
    traffic = predict(run, run_cluster(run)).traffic
    assert found == {key: (one.calls, one.num_bytes) for key, one in traffic.items() if key[0] == "shard"}
