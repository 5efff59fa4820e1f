"""`weft tune ranks-per-device`: what it measures, what it chooses, and what it leaves out in words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest
from commands_for_tests import caller
from runs_for_tests import make_run, write_run_file

from weft.commands import tune
from weft.commands.tune import Measurement, choose, in_words, measure_rounds, near_fastest, with_ranks
from weft.errors import ConfigError
from weft.launch.fork_server import ForkServer
from weft.run_file import FROZEN_SUFFIX, Run, load_run


def measured(*rates: float) -> list[Measurement]:
    """Measurements of 1, 2, .. ranks; a rate of 0 was refused."""
    rows = enumerate(rates, start=1)
    return [Measurement(number, rate, 1.0, 1 << 30, "" if rate else "no memory") for number, rate in rows]


def test_the_fewest_ranks_that_are_within_3_percent_of_the_fastest_are_chosen() -> None:
    assert choose(measured(100, 90, 80)) == 1
    assert choose(measured(100, 102, 101)) == 1  # not worth the memory of another model
    assert choose(measured(100, 104, 106)) == 2
    assert choose(measured(100, 95, 150, 151)) == 3  # a loss on the way does not end the search
    assert choose(measured(0, 90, 120)) == 3
    with pytest.raises(ConfigError, match="no number of ranks per device can be measured: no memory"):
        choose(measured(0, 0))


def test_what_comes_near_the_fastest_is_measured_again_in_turn() -> None:
    rates = {1: [80.0], 2: [90.0, 140.0, 95.0], 3: [100.0, 94.0, 93.0], 4: [0.0]}
    asked = []

    def measure_one(number: int, steps: int) -> Measurement:
        asked.append((number, steps))
        rate = rates[number].pop(0)
        return Measurement(number, rate, 1 / rate if rate else 0.0, 1, "" if rate else "no memory")

    found = measure_rounds(measure_one, 4, 10, 2)
    assert asked == [(1, 10), (2, 10), (3, 10), (4, 10), (2, 20), (3, 20), (2, 20), (3, 20)]
    assert [one.units_per_second for one in found] == [80, 95, 94, 0]  # the medians, not the first nor the fastest
    assert [one.rounds for one in found] == [(), (90, 95, 140), (93, 94, 100), ()]
    assert choose(found) == 2
    assert near_fastest(measured(100, 84, 70)) == [1]
    assert near_fastest(measured(95, 100, 90, 97)) == [1, 2, 4]  # at most three
    assert measure_rounds(lambda number, steps: measured(100, 50)[number - 1], 2, 10, 2) == measured(100, 50)


def test_the_words() -> None:
    one, two = measured(1000, 1580)
    words = "2 per device  1,580 tokens/s, 1.58 × one rank, step 1000.0 ms, 1.00 GiB a rank"
    assert in_words(two, one, "sequences") == words
    assert in_words(replace(two, rounds=(1.0, 2.0, 3.0)), one, "sequences") == f"{words}, the median of 3"
    assert in_words(measured(0)[0], one, "images") == "1 per device  not measured: no memory"


def test_the_global_batch_stays(tmp_path: Path) -> None:
    run = make_run(write_run_file(tmp_path), "run", "plan.data=2", "plan.micro_batch=4", "train.device=cpu")
    three = with_ranks(run, 2)
    assert (three.plan.data, three.plan.ranks_per_device, three.plan.micro_batch) == (4, 2, 4)
    assert three.split.batch == run.split.batch == 16
    assert with_ranks(run, 4).plan.micro_batch is None  # 2 sequences a rank
    assert (
        with_ranks(three, 1).plan == make_run(tmp_path / "tiny.toml", "run", "plan.data=2", "plan.micro_batch=4").plan
    )
    with pytest.raises(ConfigError, match="a batch of 16 does not divide over 6 ranks"):
        with_ranks(run, 3)


@pytest.mark.parametrize(
    "more",
    [
        ["numbers.on_bad=repeat"],
        ["numbers.on_bad=rollback"],
        ["roles.validator=1", "roles.loader=1", "train.evaluate_every=5", "train.patience=2"],
    ],
    ids=str,
)
def test_what_is_measured_is_a_run_that_can_be_read(
    more: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without evaluations and checkpoints, which some keys need."""
    measured_runs: list[Run] = []

    def start_ranks(fork_server: ForkServer, run: Run, arguments: object) -> int:
        path = tmp_path / f"run{FROZEN_SUFFIX}"
        path.write_text(run.to_json())
        measured_runs.append(load_run(path))
        return 7

    monkeypatch.setattr(tune, "start_ranks", start_ranks)
    run = make_run(write_run_file(tmp_path), "run", "plan.data=2", "train.device=cpu", *more)
    found = tune.measure(cast(ForkServer, None), run, 1, 5, 1)
    assert found.refused == "training ended with status 7"
    assert (measured_runs[0].roles.loader, measured_runs[0].roles.validator) == (run.roles.loader, 0)


@pytest.mark.processes
def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    weft = caller(monkeypatch, capfd)
    given = ["--most", 3, "--steps", 5, "--warm-up", 1, "--rounds", 0, "train.device=cpu", f"folder={tmp_path}/kept"]
    left = weft("tune", "ranks-per-device", write_run_file(tmp_path), *given, "--json")
    assert left.status == 0, left.err
    rows = left.json["measured"]
    assert [row["ranks_per_device"] for row in rows] == [1, 2, 3]
    assert [row["units_per_second"] > 0 for row in rows] == [True, True, False]
    assert "a batch of 16 does not divide over 3 ranks" in rows[2]["refused"]
    chosen = left.json["chosen"]
    assert left.json["overrides"] == f"plan.data={chosen} plan.ranks_per_device={chosen}"
    assert "planned" not in left.err  # ranks use the plan that is measured
    assert not (tmp_path / "kept").exists()
