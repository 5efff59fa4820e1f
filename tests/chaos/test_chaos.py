"""`weft chaos`: faults follow from the seed, are really done, and change nothing; what is not cured is told."""

from __future__ import annotations

import json
import math
import os
import random
import re
import signal
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import experts_for_tests
import pytest
import torch
from commands_for_tests import Left, Weft
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from runs_for_tests import make_run, train_on_ranks, write_run_file

from weft.chaos.report import BaselineRun, ChaosReport, GoodputPrediction, by_kind, differences
from weft.chaos.storm import KINDS, REPEATABLE, Fault, FaultRecord, Storm, parse_kinds, schedule, survival_overrides
from weft.checkpoint import Piece, Region, Saver
from weft.commands import chaos as chaos_command
from weft.errors import ConfigError
from weft.health.rank_status import FOLDER_VARIABLE, Status
from weft.launch.fork_server import RankExit
from weft.parallel.model_state import all_flats
from weft.resilience.faults import VARIABLE, Faults, request_fault, request_path
from weft.run_file import load_run
from weft.train import loop, parts

pytestmark = pytest.mark.processes


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    return write_run_file(tmp_path)


# --- the schedule


@given(st.integers(0, 2**32), st.sampled_from([KINDS, ("kill",), ("nan", "flip")]), st.integers(2, 9))
def test_faults_follow_from_the_seed(seed: int, kinds: Sequence[str], num_ranks: int) -> None:
    first, again, slower, other = (
        list(islice(schedule(kinds, mtbf, num_ranks, own), 20))
        for mtbf, own in ((3.0, seed), (3.0, seed), (6.0, seed), (3.0, seed + 1))
    )
    assert first == again
    assert first != other
    assert [fault.after_seconds for fault in slower] == pytest.approx([2 * fault.after_seconds for fault in first])
    assert all(fault.kind in kinds and 0 <= fault.rank < num_ranks for fault in first)


def test_gaps_are_exponential_and_all_kinds_and_ranks_come() -> None:
    faults = list(islice(schedule(KINDS, 4.0, 4, 0), 20_000))
    gaps = [fault.after_seconds for fault in faults]
    assert statistics.mean(gaps) == pytest.approx(4.0, rel=0.03)
    assert sum(gap > 8.0 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-2), rel=0.06)
    for kind in KINDS:
        assert sum(fault.kind == kind for fault in faults) == pytest.approx(20_000 / 6, rel=0.06)
    assert {fault.rank for fault in faults} == {0, 1, 2, 3}


# --- what is struck, and when


class Ranks:
    """Two ranks that only have pages, and a storm over them; signals are taken down."""

    def __init__(
        self, tmp_path: Path, run_file: Path, faults: list[Fault], kinds: Sequence[str] = KINDS, roles: str = ""
    ) -> None:
        self.folder, self.signals = tmp_path / "pages", list[tuple[int, int]]()
        self.folder.mkdir(parents=True)
        run = make_run(run_file, "storm", "plan.data=2", "train.steps=50", *filter(None, [roles]))
        self.storm = Storm(run, iter(faults), kinds, tmp_path)
        self.environ = {FOLDER_VARIABLE: str(self.folder), "TORCHELASTIC_RUN_ID": "weft-none"}
        self.now = 100.0

    def start(self, *pids: int) -> None:
        self.storm.ranks_started(pids or (11, 12), self.environ)
        self.pages = [Status(self.environ, rank) for rank in range(2)]

    def at(self, seconds: float, *steps: int) -> None:
        """The storm looks, so long after 100 s, when ranks have finished these steps."""
        self.now = 100.0 + seconds
        for page, step in zip(self.pages, steps, strict=False):
            page.step_begins(step)
            page.phase("forward and backward")
        with (
            patch("weft.chaos.storm.time.monotonic", lambda: self.now),
            patch("weft.chaos.storm.os.kill", lambda pid, number: self.signals.append((pid, number))),
        ):
            self.storm.poll()


def test_a_kill_is_recovered_from_when_a_new_step_is_done_after_a_restart(tmp_path: Path, run_file: Path) -> None:
    ranks = Ranks(tmp_path, run_file, [Fault(2.0, "kill", 1, 0)])
    ranks.start()
    ranks.at(0.0)  # no steps yet: the clock does not run
    ranks.at(5.0, 0, 0)
    ranks.at(6.0, 1, 1)
    assert ranks.signals == []
    ranks.at(7.0, 2, 2)
    assert ranks.signals == [(12, signal.SIGKILL)]
    ranks.at(7.1, 3)  # the other rank may finish the step that the killed one was in
    ranks.storm.rank_exited(RankExit(1, -9))
    ranks.start()
    ranks.at(9.0, 2, 2)
    ranks.at(10.0, 3, 3)
    ((one),) = ranks.storm.records
    assert (one.kind, one.ranks, one.step) == ("kill", [1], 2)
    assert one.seconds == ranks.storm.recovering_seconds == pytest.approx(3.0)
    assert by_kind([one])["all"]["longest_seconds"] == pytest.approx(3.0)


def test_while_ranks_recover_they_can_only_be_killed(tmp_path: Path, run_file: Path) -> None:
    faults = [Fault(1.0, "hang", 0, 0), Fault(1.0, "partition", 1, 0), Fault(1.0, "slow", 1, 0)]
    for kinds, signals in ((KINDS, [(11, signal.SIGSTOP), (12, signal.SIGKILL)]), (("hang",), [(11, signal.SIGSTOP)])):
        ranks = Ranks(tmp_path / str(len(kinds)), run_file, list(faults), kinds)
        ranks.start()
        ranks.at(0.0, 0, 0)
        ranks.at(0.5, 1, 1)
        ranks.at(1.0, 2, 2)
        ranks.at(2.5)
        assert ranks.signals == signals
        ranks.storm.rank_exited(RankExit(1, -9))
        ranks.at(9.0)  # the attempt is over: nobody is there to be struck
        assert ranks.signals == signals


def test_a_slow_rank_stops_and_goes_on_and_is_awake_in_the_end(tmp_path: Path, run_file: Path) -> None:
    ranks = Ranks(tmp_path, run_file, [Fault(1.0, "slow", 1, 0)])
    ranks.start()
    ranks.at(0.0, 0, 0)
    for tenth in range(10, 40):
        ranks.at(tenth / 10, tenth, tenth)
    assert ranks.signals.count((12, signal.SIGSTOP)) in (9, 10, 11)
    assert ranks.signals[-1] == (12, signal.SIGCONT)
    assert [one.seconds for one in ranks.storm.records] == [None]  # nothing to recover from


def test_a_partition_stops_half_of_the_ranks(tmp_path: Path, run_file: Path) -> None:
    ranks = Ranks(tmp_path, run_file, [Fault(1.0, "partition", 1, 1), Fault(9.0, "kill", 1, 1)])
    ranks.start()
    ranks.at(0.0, 0, 0)
    ranks.at(1.0, 1, 1)
    assert ranks.signals == [(11, signal.SIGSTOP)]


def test_a_killed_loader_is_nothing_to_recover_from(tmp_path: Path, run_file: Path) -> None:
    """Two training ranks, which have pages, and two loaders, which have none."""
    ranks = Ranks(tmp_path, run_file, [Fault(1.0, "role", 0, 3), Fault(1.0, "kill", 1, 0)], roles="roles.loader=2")
    ranks.start(11, 12, 13, 14)
    ranks.at(0.0, 0, 0)
    ranks.at(1.0, 1, 1)
    assert ranks.signals == [(14, signal.SIGKILL)]
    ranks.storm.rank_exited(RankExit(3, -9))
    ranks.storm.rank_started_again(3, 15)
    assert by_kind(ranks.storm.records)["role"]["faults"] == 1
    ranks.at(2.5, 3, 3)
    assert ranks.signals[1:] == [(12, signal.SIGKILL)]  # the job is not over, so the next fault comes
    first = ranks.storm.records[0]
    assert (first.kind, first.ranks, first.seconds) == ("role", [3], None)
    assert ranks.storm.restarts == 0


def test_a_loader_that_came_back_is_killed_by_its_new_id(tmp_path: Path, run_file: Path) -> None:
    ranks = Ranks(tmp_path, run_file, [Fault(1.0, "role", 0, 0), Fault(1.0, "role", 0, 0)], roles="roles.loader=1")
    ranks.start(11, 12, 13)
    ranks.at(0.0, 0, 0)
    ranks.at(1.0, 1, 1)
    ranks.storm.rank_started_again(2, 17)
    ranks.at(2.5, 2, 2)
    assert ranks.signals == [(13, signal.SIGKILL), (17, signal.SIGKILL)]


def test_nothing_strikes_in_the_last_step(tmp_path: Path, run_file: Path) -> None:
    ranks = Ranks(tmp_path, run_file, [Fault(1.0, "kill", 1, 1)])
    ranks.start()
    ranks.at(0.0, 48, 48)
    ranks.at(5.0, 49, 49)
    assert ranks.signals == []


# --- faults inside a rank


def test_a_flip_is_one_bit_and_a_nan_is_one_step(tmp_path: Path, run_file: Path) -> None:
    """On two ranks of a real run; without comparison or repetition, to see what the faults do."""
    run = make_run(run_file, "inside", "plan.data=2", "train.steps=5", "numbers.on_bad=skip")
    requests = tmp_path / "requests"
    requests.mkdir()
    strike = Faults.strike

    def watched(self: Faults, model: Any) -> None:
        flats = all_flats(model)
        before = [flat.slice.clone() for flat in flats]
        watched.step += 1  # type: ignore[attr-defined]
        if watched.step == 2 and self._path.name == "rank-00001.fault":  # type: ignore[attr-defined]
            request_fault(requests, 1, "nan", 7)
        if watched.step == 4 and self._path.name == "rank-00001.fault":  # type: ignore[attr-defined]
            request_fault(requests, 1, "flip", 7)
        strike(self, model)
        bits = [flat.slice.view(torch.int32) ^ old.view(torch.int32) for flat, old in zip(flats, before, strict=True)]
        flipped = [word & 0xFFFFFFFF for words in bits for word in words[words != 0].tolist()]
        is_due = watched.step == 4 and self._path.name == "rank-00001.fault"  # type: ignore[attr-defined]
        assert [word.bit_count() for word in flipped] == [1] * is_due
        assert not self._path.exists()

    watched.step = 0  # type: ignore[attr-defined]
    with patch.object(Faults, "strike", watched), patch.dict(os.environ, {VARIABLE: str(requests)}):
        train_on_ranks(run)
    lines = (run.folder / "metrics.jsonl").read_text()
    assert lines.count('"kind": "numbers"') == 1
    assert "no finite number in step 2" in lines


@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [b"", b"rm -rf 1", b"nan", b"flip 99999999999", b"nan 1" + b"0" * 100, b"\xff\x00"])
def test_a_request_that_is_none_is_removed_and_does_nothing(tmp_path: Path, text: bytes) -> None:
    request_path(tmp_path, 3).write_bytes(text)
    Faults(tmp_path, 3).strike(torch.nn.Linear(2, 2))
    assert not request_path(tmp_path, 3).exists()


def test_without_the_tool_no_rank_looks_for_faults() -> None:
    assert Faults.of({}, 0) is None
    assert "Faults.of(os.environ" in Path(parts.__file__).read_text()


# --- the prediction


def test_the_prediction_is_what_a_simulation_finds(run_file: Path) -> None:
    """Kills that take 2 s, hangs that take 5 s; a step a tenth of a second; a fault in 20 s."""
    storm = Storm(make_run(run_file, "predicted", "plan.data=2"), iter(()), ("kill", "hang"), Path())
    taken = {"kill": 2.0, "hang": 5.0}
    storm.records = [FaultRecord(kind, [0], 0.0, 9, 0, seconds + 0.1) for kind, seconds in taken.items()]
    found = GoodputPrediction.of(storm, 0.1, 20.0)
    assert found is not None
    assert found.interval_seconds == pytest.approx(0.1)
    assert found.restart_seconds == pytest.approx(3.5)
    draw, passed, kept, left = random.Random(0), 0.0, 0.0, 0.0
    for _ in range(200_000):
        gap = draw.expovariate(1 / 20)
        passed += gap
        kept += (gap - left) // 0.1 * 0.1 if gap > left else 0
        left = taken[draw.choice(["kill", "hang"])]
    assert found.goodput == pytest.approx(kept / passed, rel=0.01)
    assert GoodputPrediction.of(Storm(storm.run, iter(()), ("slow",), Path()), 0.1, 20.0) is None
    storm.kinds = ("kill", "hang", "slow")  # every third fault needs no recovery
    found = GoodputPrediction.of(storm, 0.1, 20.0)
    assert found is not None
    assert found.mtbf_seconds == pytest.approx(30.0)


# --- bad input


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--kinds", "kill,flood", "plan.data=2"],
            "'flood' is no kind of fault; there are kill, hang, slow, nan, flip",
        ),
        (["--kinds", "", "plan.data=2"], "'' is no kind of fault"),
        (["--mtbf", "0s", "plan.data=2"], "--mtbf 0s is no time; give a number above 0"),
        (["--mtbf", "-3s", "plan.data=2"], "--mtbf -3s is no time"),
        (["plan.data=1"], "the plan has one rank, which nobody starts again; give e.g. plan.data=2"),
        ([], "has no [plan]; write one with: weft plan"),
        (["plan.shard=2"], "--kinds flip: with plan.data = 1 there is no second copy"),
        (["plan.data=2", "numbers.on_bad=skip"], "with numbers.on_bad = 'skip' a NaN by chance changes the result"),
    ],
    ids=str,
)
def test_bad_input_is_refused(weft: Weft, run_file: Path, arguments: list[str], message: str) -> None:
    left = weft("chaos", run_file, *arguments)
    assert left.status == 2
    assert message in left.err
    assert not (run_file.parent / "runs").exists()


def test_under_a_launcher_it_is_refused(weft: Weft, run_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost"}.items():
        monkeypatch.setenv(name, value)
    for name in ("MASTER_PORT", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    left = weft("chaos", run_file, "plan.data=2")
    assert left.status == 2
    assert "weft chaos starts ranks by itself; run it without torchrun" in left.err


def test_what_the_run_file_says_is_left(run_file: Path) -> None:
    given = ["plan.data=2", "numbers.compare_every=7", "numbers.on_bad=repeat", "checkpoint.memory_every=5"]
    changes = survival_overrides(make_run(run_file, "given", *given, "restart.hang_seconds=2"), KINDS)
    assert changes == ["restart.limit=1000000", "restart.hang_seconds=2", "train.timeout_seconds=30"]
    changes = survival_overrides(make_run(run_file, "given", "plan.data=2"), KINDS)
    assert changes[3:] == ["checkpoint.memory_every=1", "numbers.on_bad=repeat", "numbers.compare_every=1"]
    assert parse_kinds("nan, kill,nan") == ("kill", "nan")


def test_an_earlier_undisturbed_run_is_used_again_and_no_other(run_file: Path, tmp_path: Path) -> None:
    own = ["plan.data=2", f"folder={tmp_path / 'undisturbed'}"]
    known = {"run": load_run(run_file, own).to_toml(), "folder": "there", "seconds": 9.0, "step_seconds": 0.1}
    (tmp_path / "undisturbed").mkdir()
    (tmp_path / "undisturbed" / "chaos.json").write_text(json.dumps(known))
    fork_server: Any = None  # nobody is started
    assert chaos_command._undisturbed_run(fork_server, run_file, own, Console()) == BaselineRun("there", 9.0, 0.1)
    with pytest.raises(ConfigError, match="undisturbed is of another run file; remove it"):
        chaos_command._undisturbed_run(fork_server, run_file, [*own, "train.steps=7"], Console())


def test_a_run_that_is_over_at_once_is_refused(run_file: Path, tmp_path: Path) -> None:
    """On a fast machine a small run ends before anybody has looked."""
    own = ["plan.data=2", "train.steps=3", f"folder={tmp_path / 'undisturbed'}"]

    def train(fork_server: Any, storm: Storm, *_: Any) -> tuple[int, Path]:
        (storm.run.folder / "checkpoints" / "step-00000003").mkdir(parents=True)
        return 0, storm.run.folder / "agent.log"

    fork_server: Any = None  # nobody is started
    with (
        patch.object(chaos_command, "_train", train),
        pytest.raises(ConfigError, match=r"was over before it was looked at; give it more steps \(train.steps\)"),
    ):
        chaos_command._undisturbed_run(fork_server, run_file, own, Console())


def test_on_gpus_runs_are_trained_with_kernels_that_repeat_their_bits(run_file: Path) -> None:
    run = make_run(run_file, "gpu", "plan.data=2")
    assert REPEATABLE not in survival_overrides(run, KINDS)
    with patch("weft.chaos.storm.device_type", lambda run: "cuda"):
        assert REPEATABLE in survival_overrides(run, KINDS)
        deterministic = make_run(run_file, "gpu", "plan.data=2", REPEATABLE)
        assert REPEATABLE not in survival_overrides(deterministic, KINDS)


def test_a_run_that_ends_before_its_first_fault_is_refused(run_file: Path) -> None:
    run, baseline = make_run(run_file, "short", "plan.data=2", "train.steps=60"), BaselineRun("there", 5.0, 0.1)
    options = chaos_command.ChaosOptions("20s", None, 3)
    chaos_command._refuse_too_short(run, baseline, Fault(4.8, "kill", 0, 0), options)
    words = (
        "first fault comes after 10.00 s .--mtbf 20s, --seed 3.*took 5.00 s: none would come; give e.g. train.steps=240"
    )
    with pytest.raises(ConfigError, match=words):
        chaos_command._refuse_too_short(run, baseline, Fault(10.0, "kill", 0, 0), options)


def test_what_a_report_says_of_bits(run_file: Path, tmp_path: Path) -> None:
    """Equal bits without a fault show nothing, and neither do different bits of runs that do not repeat theirs."""
    storm = Storm(make_run(run_file, "said", "plan.data=2"), iter(()), ("kill",), Path(), warm_at=1.0, ended_at=9.0)
    record = FaultRecord("kill", [0], 1.0, 3, 0, 2.0)

    def verdict(records: list[FaultRecord], differ: list[str], control: list[str] | None) -> tuple[bool, str]:
        one = replace(storm, records=records)
        found = ChaosReport(BaselineRun("", 6.0, 0.1), one, 20.0, 0, None, 0, 40, differ, tmp_path, control)
        assert found.to_json()["passed"] == found.passed
        return found.passed, chaos_command._verdict(found)

    passed, words = verdict([], [], None)
    assert not passed
    assert "NO FAULT" in words
    assert "came in 8.00 s" in words
    passed, words = verdict([record], ["parameter a"], ["parameter b"])
    assert not passed
    assert "NO ANSWER" in words
    passed, words = verdict([record], ["parameter a"], [])
    assert not passed
    assert "DIFFERS" in words
    assert verdict([record], [], None)[0]


def test_the_time_of_a_run_begins_behind_its_first_step(tmp_path: Path, run_file: Path) -> None:
    """The first step compiles, in one of the two runs only: the goodput of a run without faults was 131.9 %."""
    ranks = Ranks(tmp_path, run_file, [])
    ranks.start()
    ranks.at(0.0, 0, 0)
    ranks.at(30.0, 1, 1)
    ranks.at(31.0, 2, 2)
    ranks.storm.ended_at = 100.0 + 32.0
    assert ranks.storm.seconds == pytest.approx(2.0)


def test_checkpoints_that_differ_in_a_bit_are_told_apart(tmp_path: Path) -> None:
    def save(name: str, **tensors: list[float]) -> Path:
        pieces = [Piece(n, "parameter", Region.whole((len(v),)), torch.tensor(v)) for n, v in tensors.items()]
        Saver(tmp_path / name, 0, 1, "token").save(1, pieces, {}, asynchronous=False)
        return tmp_path / name / "step-00000001"

    one = save("one", a=[0.0, math.nan], b=[1.0])
    assert differences(one, save("same", a=[0.0, math.nan], b=[1.0])) == (2, [])
    assert differences(one, save("zero", a=[-0.0, math.nan], b=[1.0])) == (2, ["parameter a"])
    assert differences(one, save("less", a=[0.0, math.nan])) == (2, ["parameter b"])
    assert differences(one, save("long", a=[0.0, math.nan], b=[1.0, 2.0])) == (2, ["parameter b"])


# --- the whole


RANKS = ["plan.data=2", "train.steps=100", "checkpoint.every=50", "train.evaluate_every=1000"]
BETWEEN = 12  # steps, from one fault to the next
MOST_SECONDS = 120


class Patient(Storm):
    """Waits for ranks that train, and keeps count of its faults for them."""

    count: Path

    def _inject(self, fault: Fault, is_training: bool, now: float) -> None:
        if is_training:
            super()._inject(fault, is_training, now)
        else:
            self._next = fault

    def _record(self, *arguments: Any) -> None:
        super()._record(*arguments)
        self.count.with_suffix(".new").write_text(str(len(self.records)))
        self.count.with_suffix(".new").rename(self.count)


def wait_for_a_fault(count: Path, most: int, status: Status, requests: Path) -> None:
    """Ranks do not run ahead of the faults: how many come does not depend on how fast the machine is."""
    deadline = time.monotonic() + MOST_SECONDS
    while time.monotonic() < deadline:
        seen, struck = status.page(), int(count.read_text()) if count.exists() else 0
        assert seen is not None
        is_first = seen.step_seconds == 0  # of this attempt: faults wait for ranks that have done a step
        if struck == most or seen.step < BETWEEN * (struck + 1) or is_first or any(requests.iterdir()):
            return
        status.phase("waiting for a fault")  # a sign of life
        time.sleep(0.01)


def chaos(
    weft: Weft, run_file: Path, folder: Path, kinds: Sequence[str], *options: str, ranks: Sequence[str] = RANKS
) -> Left:
    """`weft chaos` with one fault of each of these kinds, in this order, each soon after ranks train."""
    faults = [Fault(0.05, kind, number % 2, 5 + number) for number, kind in enumerate(kinds)]
    Patient.count = run_file.with_name("count")
    train_step = loop.train_step

    def patient_step(*arguments: Any) -> Any:
        status = arguments[3].ledger.status
        if VARIABLE in os.environ:
            wait_for_a_fault(Patient.count, len(kinds), status, Path(os.environ[VARIABLE]))
        return train_step(*arguments)

    command = ["chaos", run_file, *ranks, f"folder={folder}", "--mtbf", "3s", "--kinds", ",".join(kinds), *options]
    patched = patch.multiple(chaos_command, Storm=Patient, schedule=lambda *_: iter(faults))
    with patched, patch.object(loop, "train_step", patient_step):
        return weft(*command)


@pytest.mark.parametrize(
    "kinds",
    [
        ["nan", "flip"],
        pytest.param(["hang", "kill", "nan", "slow", "flip", "partition"], marks=pytest.mark.soak),
    ],
    ids=",".join,
)
def test_faults_change_nothing(weft: Weft, run_file: Path, tmp_path: Path, kinds: list[str]) -> None:
    left = chaos(weft, run_file, tmp_path / "run", kinds, "--json")
    found = left.json
    assert left.status == 0, left.err
    assert (found["equal"], found["differ"]) == (True, [])
    assert found["num_tensors"] > 20
    assert [fault["kind"] for fault in found["faults"]] == kinds
    cured_by_restarts = set(kinds) - {"nan", "slow"}  # a NaN is cured without one, and slowness needs none
    assert found["restarts"] >= len(cured_by_restarts)
    assert found["goodput"] > 0  # above 1 where the machine was busy with something else in the undisturbed run
    assert 0 < found["training_share"] < 1
    assert 0 < found["predicted"]["goodput"] < 1
    assert "start again (restart 1 of" in Path(found["log"]).read_text()


@pytest.mark.soak
def test_faults_change_nothing_of_experts(weft: Weft, tmp_path: Path) -> None:
    ranks = ["plan.expert=2", "train.steps=60", "checkpoint.every=20", "train.evaluate_every=1000"]
    run_file = write_run_file(tmp_path, experts_for_tests.RUN_FILE)
    left = chaos(weft, run_file, tmp_path / "run", ["kill", "nan"], "--json", ranks=ranks)
    assert left.status == 0, left.err
    assert (left.json["equal"], left.json["differ"]) == (True, [])
    assert [fault["kind"] for fault in left.json["faults"]] == ["kill", "nan"]


@pytest.mark.soak
def test_ranks_of_all_roles_are_killed_and_nothing_changes(weft: Weft, run_file: Path, tmp_path: Path) -> None:
    """Curvature, loader, a training rank, curvature, loader, validator; evaluations are further apart than the time-out
    of collectives.
    """
    roles = ["roles.loader=1", "roles.validator=1", "roles.curvature=1", "train.timeout_seconds=5"]
    kfac = ['train.kfac={mode="sub-grid", damping=1e-2, inverse_every=3}', "plan.exact=false"]
    kinds = ["role", "role", "kill", "role", "role", "role"]
    left = chaos(weft, run_file, tmp_path / "run", kinds, *roles, *kfac, "train.evaluate_every=90", "--json")
    assert left.status == 0, left.err
    found = left.json
    assert (found["equal"], found["differ"]) == (True, [])
    assert [fault["kind"] for fault in found["faults"]] == kinds
    assert {rank for fault in found["faults"] for rank in fault["ranks"] if fault["kind"] == "role"} == {2, 3, 4}
    assert found["restarts"] == 1  # for the training rank


@pytest.mark.soak
def test_a_fault_that_is_not_cured_is_told(weft: Weft, run_file: Path, tmp_path: Path) -> None:
    """The negative control: bits flip, and nobody compares."""

    def without_comparison(*arguments: Any) -> list[str]:
        return [one for one in survival_overrides(*arguments) if "compare_every" not in one]

    with patch.object(chaos_command, "survival_overrides", without_comparison):
        left = chaos(weft, run_file, tmp_path / "run", ["flip"])
    assert left.status == 1
    assert re.search(r"DIFFERS +\d+ of \d+ tensors: exp_avg model\.", left.out)
