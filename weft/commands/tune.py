"""`weft tune`: chooses a setting of a run by short measurements on this machine."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

from weft.commands.out_of_memory import refuse_if_too_large
from weft.errors import ConfigError
from weft.launch.fork_server import ForkServer
from weft.planner.predict import predict, run_cluster
from weft.run_file import Run
from weft.train.local_job import start_ranks

WORTH = 1.03  # more ranks must be faster by this factor: each of them takes memory for a whole model
NUM_READINGS = 5  # of the rate, of which the median counts
NEAR = 0.85  # of the fastest: slower numbers of ranks are not measured again
MOST_NEAR = 3  # numbers of ranks that are measured again
LONGER = 2  # times the steps of the first round, in each further one


@dataclass(frozen=True)
class Measurement:
    """What was measured of a number of ranks per device: samples (tokens or images) a second of the whole run, the
    seconds of a step, and the peak memory of the first rank. `refused` says why it was not measured. If it was measured
    several times, `rounds` has all rates, and the others are of the median.
    """

    ranks_per_device: int
    units_per_second: float = 0.0
    step_seconds: float = 0.0
    memory_bytes: int = 0
    refused: str = ""
    rounds: tuple[float, ...] = ()


@dataclass(frozen=True)
class RankTuning:
    """The number of ranks per device to use, what was measured, and the changes to the run."""

    chosen: int
    measured: list[Measurement]
    overrides: str


def tune(
    fork_server: ForkServer, run: Run, most: int, steps: int, warm_up: int, rounds: int, console: Console
) -> RankTuning:
    """Measure 1 to `most` ranks on each of the run's devices, and the fastest of them `rounds` times more."""
    with console.status("measuring") as status:

        def measure_one(number: int, num_steps: int) -> Measurement:
            status.update(f"measuring {number} of at most {most} ranks per device, {num_steps} steps")
            return measure(fork_server, run, number, num_steps, warm_up)

        measured = measure_rounds(measure_one, most, steps, rounds)
    best = choose(measured)
    num_devices = run.plan.data // run.plan.ranks_per_device
    return RankTuning(best, measured, f"plan.data={num_devices * best} plan.ranks_per_device={best}")


def measure_rounds(
    measure_one: Callable[[int, int], Measurement], most: int, steps: int, rounds: int
) -> list[Measurement]:
    """Call `measure_one(number of ranks, steps)` for 1 to `most` ranks, then `rounds` times in turn for those that come
    near the fastest. Returns the median of each number's measurements.
    """
    first = [measure_one(number, steps) for number in range(1, most + 1)]
    measured = {one.ranks_per_device: [one] for one in first}
    near = near_fastest(first)
    for _ in range(rounds if len(near) > 1 else 0):
        for number in near:
            measured[number].append(measure_one(number, LONGER * steps))
    return [median(several) for several in measured.values()]


def near_fastest(found: list[Measurement]) -> list[int]:
    """Returns the numbers of ranks that may be the best: at most `MOST_NEAR`, and not much slower than the fastest."""
    ordered = sorted((one for one in found if not one.refused), key=lambda one: -one.units_per_second)
    near = [one for one in ordered if one.units_per_second > NEAR * ordered[0].units_per_second]
    return sorted(one.ranks_per_device for one in near[:MOST_NEAR])


def median(found: list[Measurement]) -> Measurement:
    """Returns, of measurements of one number of ranks, the one with the median rate: the lower of the middle two of an
    even number.
    """
    measured = sorted((one for one in found if not one.refused), key=lambda one: one.units_per_second)
    if len(measured) < 2:
        return measured[0] if measured else found[0]
    return replace(measured[(len(measured) - 1) // 2], rounds=tuple(one.units_per_second for one in measured))


def show(found: RankTuning, run: Run, console: Console) -> None:
    """Print what was measured, and what to use."""
    lines = [in_words(one, found.measured[0], run.split.samples) for one in found.measured]
    best = found.chosen
    why = "one rank per device is best" if best == 1 else f"{best} ranks per device are best"
    lines.append(f"at {run.split.batch} {run.split.samples} a step, {why}. Use: {found.overrides}")
    for line in lines:
        console.print(line, highlight=False, soft_wrap=True)


def with_ranks(run: Run, ranks_per_device: int) -> Run:
    """Returns the run with `ranks_per_device` ranks on each of its devices, and the same global batch."""
    plan = run.plan
    ranks = plan.data // plan.ranks_per_device * ranks_per_device
    if run.split.batch % ranks:
        raise ConfigError(
            f"a batch of {run.split.batch} does not divide over {ranks} ranks; use a multiple of it, or lower --most"
        )
    micro_batch = plan.micro_batch
    if micro_batch is not None and (run.split.batch // ranks) % micro_batch:
        micro_batch = None
    changed = replace(plan, data=ranks, ranks_per_device=ranks_per_device, micro_batch=micro_batch)
    return replace(run, plan=changed, origins={**run.origins, "plan.data": "weft tune"})  # so nothing plans it anew


def measure(fork_server: ForkServer, run: Run, ranks_per_device: int, steps: int, warm_up: int) -> Measurement:
    """Train some steps with `ranks_per_device`, in a folder that is removed afterwards."""
    try:
        changed = with_ranks(run, ranks_per_device)
        cluster = run_cluster(changed)
        refuse_if_too_large(changed, cluster, predict(changed, cluster))
    except ConfigError as error:
        return Measurement(ranks_per_device, refused=str(error))
    every = max(1, steps // NUM_READINGS)
    total = (math.ceil(warm_up / every) + NUM_READINGS) * every
    with TemporaryDirectory(prefix="weft-tune-", ignore_cleanup_errors=True) as folder:
        train = replace(run.train, timeline=None, profile=None, patience=None, schedule="constant", decay_steps=None)
        train = replace(train, steps=total, log_every=every, evaluate_every=None, warmup_steps=0)
        checkpoint = replace(run.checkpoint, every=None, memory_every=None)
        numbers, roles = run.numbers, replace(run.roles, validator=0)  # there are no evaluations
        if numbers.on_bad in ("repeat", "rollback"):  # and no checkpoints to go back to
            numbers = replace(numbers, on_bad="skip")
        changed = replace(changed, folder=Path(folder) / "run", train=train, checkpoint=checkpoint)
        changed = replace(changed, numbers=numbers, roles=roles)
        status = start_ranks(fork_server, changed, lambda file: ["train", str(file), "--json"])
        if status:
            return Measurement(ranks_per_device, refused=f"training ended with status {status}")
        return _read(changed, ranks_per_device)


def _read(run: Run, ranks_per_device: int) -> Measurement:
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    events: list[dict[str, Any]] = [event for event in map(json.loads, lines) if event["kind"] == "step"]
    timed = events[-NUM_READINGS:]
    name = next(key for key in timed[0] if key.endswith("_per_second"))
    rate = statistics.median(event[name] for event in timed)
    memory = max(event["memory_bytes"] for event in timed)
    return Measurement(ranks_per_device, rate, run.split.tokens / rate, memory)


def choose(found: list[Measurement]) -> int:
    """Returns the number of ranks per device to use: the fewest that are less than 3 % slower than the fastest."""
    measured = [one for one in found if not one.refused]
    if not measured:
        raise ConfigError(f"no number of ranks per device can be measured: {found[0].refused}")
    fastest = max(one.units_per_second for one in measured)
    return next(one.ranks_per_device for one in measured if one.units_per_second * WORTH > fastest)


def in_words(one: Measurement, first: Measurement, samples: str) -> str:
    """Returns a line about one number of ranks per device."""
    unit = "tokens" if samples == "sequences" else samples
    if one.refused:
        return f"{one.ranks_per_device} per device  not measured: {one.refused}"
    gain = f", {one.units_per_second / first.units_per_second:.2f} × one rank" if first.units_per_second else ""
    return (
        f"{one.ranks_per_device} per device  {one.units_per_second:,.0f} {unit}/s{gain}, step "
        f"{one.step_seconds * 1e3:.1f} ms, {one.memory_bytes / 2**30:.2f} GiB a rank"
        + (f", the median of {len(one.rounds)}" if one.rounds else "")
    )
