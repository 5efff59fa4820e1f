"""K-FAC with curvature ranks: equal to inline, or to a replay of its lags; bytes, saves, and ranks that are lost.

Curvature ranks are threads of training rank 0 here, over the same channels; tests/roles/ has processes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from kfac_for_tests import (
    OPTIONS,
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
    values,
)
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]  # as documented

from weft.checkpoint import Checkpoint
from weft.checkpoint.folder import step_name
from weft.comm import Ledger, add_traffic
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.optim.adamw import AdamW
from weft.optim.kfac import KFAC
from weft.optim.kfac_placement import NUM_STATISTICS
from weft.optim.saved_state import load_state
from weft.parallel.apply import parallelize
from weft.parallel.model_state import state_bytes
from weft.plan import Plan
from weft.roles import curvature
from weft.roles.curvature import CURVATURE, CurvatureRanks, serve_curvature
from weft.roles.links import RoleLink, digest, meet_trainers
from weft.run_tables import Kfac

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=60)
OWN = digest({"train.seed": "0"})
OFTEN = replace(OPTIONS, factor_every=1, inverse_every=2)
Lags = list[tuple[int, int]]


@pytest.fixture(autouse=True)
def _in_float64() -> Any:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


def in_child(test: Callable[..., None]) -> Callable[..., None]:
    """Runs a test in a forked process: one that has computed inverses in threads cannot fork ranks that compute."""

    @wraps(test)
    def run(*arguments: Any, **named: Any) -> None:
        run_local(lambda index: test(*arguments, **named), 1)

    return run


class Threads:
    """Curvature ranks as threads of this process; `gate` is called before each of their answers."""

    def __init__(self, count: int, gate: Callable[[int], None] = lambda number: None) -> None:
        self.store, self.count, self.said = HashStore(), count, list[str]()
        self.sent, self.answered = Ledger(), Ledger()
        self._gate = gate
        for number in range(count):
            self.start(number)

    def start(self, number: int) -> None:
        threading.Thread(target=self._serve, args=(number,), daemon=True).start()

    def _serve(self, number: int) -> None:
        torch.set_num_threads(1)
        (channel,) = meet_trainers(self.store, CURVATURE, number, 1, OWN, self.answered, TIMEOUT)
        send = channel.send

        def gated(tensor: Tensor) -> Any:
            self._gate(number)
            return send(tensor)

        with patch.object(channel, "send", gated):
            try:
                serve_curvature(channel, self.store, number, OPTIONS.damping)
            except ZeroDivisionError:
                channel._group = None  # type: ignore[assignment]  # closes the connection, as a process that dies does

    def attach(self, optimizer: KFAC) -> CurvatureRanks:
        """Lets these ranks invert the factors of training rank 0."""
        links = [RoleLink(self.store, CURVATURE, each, 0, self.sent, TIMEOUT) for each in range(self.count)]
        for link in links:
            link.connect(OWN)
        sizes, say = [one.layer for one in optimizer.states], self.said.append
        ranks = CurvatureRanks(links, OWN, self.store, sizes, torch.float64, OPTIONS.damping, TIMEOUT, say)
        optimizer.sub_grid.inverter = ranks
        return ranks


def mesh_of(degree: int) -> Mesh:
    return Mesh(Plan(data=degree, exact=False, precision="fp64"))


# --- synchronous


def check_bytes(mesh: Mesh, mode: Any) -> None:
    """A step that samples and renews sends what is predicted; state is that of the prediction."""
    model, optimizer = build(mesh, mode, replace(OPTIONS, factor_every=1, inverse_every=1))
    train(model, optimizer, mesh, range(1))
    if mesh.rank == 0 and mode == "sub-grid-async":
        assert optimizer.sub_grid.inverter.has_answer()
    mesh.ledger.clear()
    train(model, optimizer, mesh, range(1, 2))
    counted = traffic_of(mesh)
    adamw = parallelize(make_model(), mesh.plan, mesh)
    mesh.ledger.clear()
    train(adamw, AdamW(adamw), mesh, range(1))
    more, state = predicted(mesh, model, optimizer)
    wanted = add_traffic(traffic_of(mesh), more)
    assert {key: (one.calls, one.num_bytes) for key, one in counted.items()} == {
        key: (one.calls, one.num_bytes) for key, one in wanted.items()
    }
    assert state_bytes(model, optimizer)["optimizer"] == state


def on_curvature_ranks(mesh: Mesh, count: int) -> list[Tensor]:
    """The parameters after all steps with so many curvature ranks, with their messages counted."""
    model, optimizer = build(mesh, "sub-grid")
    threads = Threads(count) if mesh.rank == 0 else None
    ranks = threads.attach(optimizer) if threads is not None else None
    train(model, optimizer, mesh, range(STEPS))
    if threads is not None and ranks is not None:
        ranks.close()
        layers, num_renewals = [one.layer for one in optimizer.states], len(range(0, STEPS, OPTIONS.inverse_every))
        numel, requests = sum(one.numel for one in layers), num_renewals * count
        sent, answered = (one.entries()[CURVATURE, "send"] for one in (threads.sent, threads.answered))
        assert (sent.calls, sent.num_bytes) == (2 * requests + count, 8 * (num_renewals * numel + requests + count))
        whole = num_renewals * (numel + NUM_STATISTICS * len(layers))
        assert (answered.calls, answered.num_bytes) == (requests, 8 * whole)
        assert threads.said == []
    return values(model)


def swapped(given: Tensor, sizes: Sequence[Any], damping: float) -> Tensor:
    """A wrong answer: A⁻¹ and G⁻¹ of each square layer in each other's place."""
    message = inverted(given, sizes, damping)
    parts = message.split([one.numel + NUM_STATISTICS for one in sizes])
    for part, one in zip(parts, sizes, strict=True):
        if one.inputs == one.outputs:
            first, second = part[: one.input_numel].clone(), part[one.input_numel : one.numel].clone()
            part[: one.input_numel], part[one.input_numel : one.numel] = second, first
    return message


inverted = curvature.invert_message


@pytest.mark.parametrize("degree", [4, pytest.param(8, marks=pytest.mark.soak)])
def test_sub_grid_equals_inline_and_owner_sharded(degree: int) -> None:
    wanted = reference()

    def rank(index: int) -> dict[str, float]:
        mesh, found = mesh_of(degree), dict[str, float]()
        inline, optimizer = build(mesh, "inline")
        train(inline, optimizer, mesh, range(STEPS))
        for count in (1, 2):
            found[f"{count} to inline"] = difference(on_curvature_ranks(mesh, count), values(inline))
        found["to one process"] = difference(values(inline), wanted)
        sharded, optimizer = build(mesh, "owner-sharded")
        train(sharded, optimizer, mesh, range(STEPS))
        found["to owner-sharded"] = difference(values(sharded), values(inline))
        for mode in ("sub-grid", "sub-grid-async"):
            check_bytes(mesh, mode)
        return found

    for found in run_local(rank, degree):
        assert found["1 to inline"] == found["2 to inline"] == 0
        assert max(found.values()) < 1e-12


@pytest.mark.parametrize("swaps", [False, True])
@in_child
def test_swapped_inverses_are_found(swaps: bool) -> None:
    mesh, found = mesh_of(1), []
    given = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)) * torch.arange(1.0, 5.0)
    for mode in ("inline", "sub-grid"):
        torch.manual_seed(0)
        model = parallelize(nn.Sequential(nn.Linear(4, 4, bias=False)), mesh.plan, mesh)
        optimizer = make_kfac(model, options=replace(OPTIONS, mode=mode))
        ranks = Threads(1).attach(optimizer) if mode == "sub-grid" else None
        with patch.object(curvature, "invert_message", swapped if swaps else inverted):
            optimizer.begin(torch.tensor(6.0))
            nn.functional.cross_entropy(model(given), torch.arange(6) % 4).backward()
            optimizer.step()
        if ranks is not None:
            ranks.close()
        found.append(values(model))
    assert (difference(*found) > 1e-6) == swaps


# --- asynchronous


class Delayed(KFAC):
    """The reference: inline K-FAC on one process, whose inverses are those that a log of lags says."""

    lags: Lags
    pending: dict[int, Any]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for of_update, used_at in self.lags:
            if used_at == self.num_updates and of_update < used_at:
                self._install(of_update)
        super().step()

    def _renew(self) -> None:
        """Invert now, and put the old inverses back until they are due."""
        before = deepcopy([one.inverses for one in self.states])
        super()._renew()
        self.pending[self.num_updates] = deepcopy([one.inverses for one in self.states])
        for one, inverses in zip(self.states, before, strict=True):
            one.inverses = inverses

    def _install(self, update: int) -> None:
        for one, inverses in zip(self.states, self.pending[update], strict=True):
            one.inverses = inverses


def replay(lags: Lags, options: Kfac) -> list[Tensor]:
    """The parameters after all steps on one process, with inverses as late as the log says."""
    model = make_model()
    optimizer = make_kfac(model, options=options)
    optimizer.__class__ = Delayed
    assert isinstance(optimizer, Delayed)
    optimizer.lags, optimizer.pending = lags, {}
    train(model, optimizer, Mesh(Plan()), range(STEPS))
    return [one.detach().flatten() for one in model.parameters()]


class Valve:
    """Holds back answers; each permit lets one out."""

    def __init__(self) -> None:
        self.permits = threading.Semaphore(0)

    def __call__(self, number: int) -> None:
        assert self.permits.acquire(timeout=60)


def test_async_goes_on_meanwhile_and_equals_a_replay_of_its_lags() -> None:
    """Answers are let out before updates 3 and 8, each while renewals are due that are skipped."""

    def rank(index: int) -> dict[str, Any]:
        mesh = mesh_of(4)
        model, optimizer = build(mesh, "sub-grid-async", OFTEN)
        valve, lags, skipped = Valve(), list[tuple[int, int]](), 0
        threads = Threads(2, valve) if index == 0 else None
        ranks = threads.attach(optimizer) if threads is not None else None
        for step in range(STEPS):
            if step in (3, 8) and ranks is not None:
                valve.permits.release(2)
                for request in ranks._requests:
                    request.thread.join(60)
            train(model, optimizer, mesh, range(step, step + 1))  # returns while curvature ranks are held up
            logged = optimizer.take_statistics()
            if logged is not None:
                lags.append((int(logged["of_update"]), int(logged["used_at_update"])))
                skipped = int(logged["skipped"])
        if ranks is not None:
            valve.permits.release(9)
            ranks.close()
        whole = [one.tolist() for one in values(model)]
        return {"lags": lags, "skipped": skipped, "values": whole if index == 0 else []}

    results = run_local(rank, 4)
    lags = [(of_update, used_at) for of_update, used_at in results[0]["lags"]]
    assert all(one["lags"] == results[0]["lags"] for one in results)
    assert lags == [(0, 3), (4, 8)]
    assert results[0]["skipped"] == 2  # at updates 2 and 6
    found = [torch.tensor(one) for one in results[0]["values"]]
    assert difference(found, replay(lags, OFTEN)) < 1e-12
    for wrong in ([(0, 3), (4, 7)], [(0, 2), (4, 8)]):  # controls
        assert difference(found, replay(wrong, OFTEN)) > 1e-6
    assert difference(found, reference()) > 1e-6


@in_child
def test_a_save_waits_for_inverses_and_any_mode_resumes_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """At the save after 5 updates the inverses of update 0 are outstanding."""
    mesh = mesh_of(1)
    model, optimizer = build(mesh, "sub-grid-async")
    valve = Valve()
    ranks = (threads := Threads(1, valve)).attach(optimizer)
    train(model, optimizer, mesh, range(SAVED))
    assert "does not precondition until the first inverses arrive" in caplog.text
    assert optimizer.sub_grid.of_update == 0
    valve.permits.release(9)
    save(tmp_path, mesh, model, optimizer)
    assert optimizer.sub_grid.of_update is None
    logged = optimizer.take_statistics()
    assert (logged["of_update"], logged["used_at_update"], logged["skipped"]) == (0, SAVED, 1)
    train(model, optimizer, mesh, range(SAVED, 8))
    ranks.close()
    for mode in ("inline", "owner-sharded", "sub-grid", "sub-grid-async"):
        again, other = build(mesh, mode)
        load_state(Checkpoint(tmp_path / step_name(SAVED)), again, other)
        assert other.num_updates == SAVED
        train(again, other, mesh, range(SAVED, 8))  # none of them renews before update 8
        assert difference(values(again), values(model)) == 0
    assert threads.said == []


# --- losses


@pytest.mark.parametrize("mode", ["sub-grid", "sub-grid-async"])
@in_child
def test_layers_of_a_lost_rank_are_inverted_by_training_rank_0_until_it_is_back(mode: Any) -> None:
    """The second answer of curvature rank 1 does not come: it dies. It is back before the third."""
    mesh, died = mesh_of(1), list[int]()

    def gate(number: int) -> None:
        if number == 1:
            died.append(number)
            if len(died) == 2:
                raise ZeroDivisionError

    def run(threads: Threads) -> list[Tensor]:
        model, optimizer = build(mesh, mode, replace(OFTEN, inverse_every=3))
        ranks = threads.attach(optimizer)
        for step in range(STEPS):
            train(model, optimizer, mesh, range(step, step + 1))
            for request in ranks._requests:  # so that lags do not depend on time
                request.thread.join(60)
            if step == 4 and len(died) == 2:
                threads.start(1)
                while ranks._links[1].newer_start() is None:
                    pass
        ranks.close()
        return values(model)

    lossless = run(Threads(2))
    threads = Threads(2, gate)
    assert difference(run(threads), lossless) == 0
    assert "lost the connection to curvature 1" in threads.said[0]
    assert "training rank 0 inverts its factors" in threads.said[0]
    assert threads.said[1:] == ["curvature 1 is back"]
    assert len(died) == 4


@in_child
def test_a_rank_without_layers_is_never_asked() -> None:
    mesh = mesh_of(1)
    model, optimizer = build(mesh, "sub-grid")
    threads = Threads(4)
    ranks = threads.attach(optimizer)  # the model has 3 layers
    train(model, optimizer, mesh, range(STEPS))
    ranks.close()
    assert threads.answered.entries()[CURVATURE, "send"].calls == 3 * 3
    assert difference(values(model), reference()) < 1e-12


@in_child
def test_an_error_of_the_inversion_here_is_raised_where_the_answer_is_taken() -> None:
    mesh = mesh_of(1)
    model, optimizer = build(mesh, "sub-grid")
    ranks = (threads := Threads(1)).attach(optimizer)
    ranks._links[0].lose()
    with (
        patch.object(curvature, "invert_message", side_effect=MemoryError("too large")),
        pytest.raises(MemoryError, match="too large"),
    ):
        train(model, optimizer, mesh, range(1))
    assert threads.said == []
