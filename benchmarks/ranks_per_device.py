"""Ranks that share a GPU (AccDP): throughput of 1 to 4 of them at a fixed global batch, and what the tuner chooses.

    python benchmarks/ranks_per_device.py [--tiny] [--models NAME ..] [--seconds S] [--out FILE]

Three runs: `cnn` (a narrow ResNet-18 on small images), `loading` (a narrower one on larger images, so that a rank works
longer on loading its images than the GPU on them), and `transformer`. For each, `weft tune ranks-per-device` measures 1
to 4 ranks, those near the fastest in several rounds, and chooses a number. Then the chosen number and all near the
fastest are measured again in rounds: how far is the choice from the best of these medians? One rank of a CNN replays
its step as a CUDA graph, as `weft train` does by default; it is also measured without. Then 2 ranks without MPS, and
one rank whose images three loaders prepare (`roles.loader`), which is weft's other way to load faster.

Each row is printed, and written to the file, as soon as it is measured. No row begins after --seconds; the file names
those that were left out. --tiny runs on any machine and proves the script. Writes
benchmarks/results/ranks-per-device-h200.json.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import harness

from weft.cluster.local_gpus import gpus
from weft.commands.app import app
from weft.commands.jobs import command_fork_server
from weft.commands.tune import LONGER, Measurement, choose, measure, measure_rounds, near_fastest
from weft.launch.fork_server import ForkServer
from weft.launch.mps import CONTROL
from weft.run_file import Run, load_run
from weft.run_tables import Roles

RESULT = harness.RESULTS / "ranks-per-device-h200.json"
ROUNDS = 2  # after the first measurement, as `weft tune` does, and in the second
COMMON = """
name = "{name}"
folder = "{folder}/{name}"
[train]
steps = 100
batch = {batch}
learning_rate = 1e-3
compile = false
timeout_seconds = 60
[restart]
limit = 0
[plan]
exact = false
data = 1
"""
IMAGES = """
[model]
architecture = "resnet"
depth = 18
width = {width}
[data]
kind = "slides"
images = {images}
size = {size}
held_out = 0.25
mirror = true
cache = "{folder}/cache"
"""
TEXT = """
[model]
architecture = "llama"
hidden_size = {width}
intermediate_size = {wide}
num_hidden_layers = {layers}
num_attention_heads = 4
num_key_value_heads = 4
[data]
source = "{source}"
tokenizer = "bytes"
sequence = {size}
cache = "{folder}/cache"
"""
MODELS = {"loading": IMAGES, "cnn": IMAGES, "transformer": TEXT}
SIZES: dict[str, dict[str, int]] = {
    "loading": {"width": 16, "size": 512, "images": 64, "batch": 24, "steps": 20},
    "cnn": {"width": 32, "size": 64, "images": 768, "batch": 48, "steps": 100},
    "transformer": {"width": 256, "wide": 1024, "layers": 6, "size": 128, "batch": 48, "steps": 50},
}
TINY: dict[str, dict[str, int]] = {
    "loading": {"width": 4, "size": 64, "images": 64, "batch": 12, "steps": 5},
    "cnn": {"width": 4, "size": 32, "images": 64, "batch": 12, "steps": 5},
    "transformer": {"width": 32, "wide": 64, "layers": 1, "size": 16, "batch": 12, "steps": 5},
}


@dataclass
class Report:
    """What was measured so far. Every row is printed and written at once."""

    path: Path
    seconds: float
    began: float = field(default_factory=time.monotonic)
    rows: list[dict[str, Any]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    choices: list[dict[str, Any]] = field(default_factory=list)

    def measure(self, fork_server: ForkServer, run: Run, what: str, number: int, steps: int) -> Measurement:
        """Measure `number` ranks per device, unless the time is spent."""
        begins = time.monotonic()
        if begins - self.began > self.seconds:
            self.left_out.append(f"{run.name}, {what}, {number} ranks")
            self.say(f"left out: {self.left_out[-1]}")
            return Measurement(number, refused="the time is spent")
        found = measure(fork_server, run, number, steps, max(1, steps // 5))
        took = time.monotonic() - begins
        self.rows.append({"model": run.name, "what": what, **asdict(found), "seconds": round(took, 1)})
        step = found.step_seconds * 1e3
        numbers = found.refused or f"{found.units_per_second:,.0f} a second, step {step:.2f} ms, row {took:.1f} s"
        self.say(f"{run.name}, {what}, {number} ranks: {numbers}")
        return found

    def say(self, words: str) -> None:
        """Print a line with the time since the start, and write all that is known."""
        print(f"{time.monotonic() - self.began:6.1f} s  {words}", flush=True)
        whole = {"rows": self.rows, "choices": self.choices}
        device = {"device": gpus()[0].name} if gpus() else {}  # asked of a child: this process may not use CUDA
        harness.write(self.path, {**device, **whole, "left_out": self.left_out}, device="cpu")


def read_run(name: str, folder: Path, tiny: bool) -> tuple[Run, int]:
    """The run of this name, and the steps to measure."""
    sizes = (TINY if tiny else SIZES)[name]
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    (texts / "all.txt").write_text("".join(path.read_text() for path in sorted(Path(__file__).parent.glob("*.py"))))
    run_file = folder / f"{name}.toml"
    run_file.write_text((COMMON + MODELS[name]).format(folder=folder, source=texts, name=name, **sizes))
    return load_run(run_file, ["train.device=cpu"] if tiny else []), sizes["steps"]


def compare(report: Report, fork_server: ForkServer, run: Run, steps: int, most: int) -> None:
    """The tuner's choice against a second measurement of it and of all that come near."""
    tuned = measure_rounds(partial(report.measure, fork_server, run, "tuner"), most, steps, ROUNDS)
    rates = {one.ranks_per_device: one.units_per_second for one in tuned if not one.refused}
    if not rates:
        return
    chosen, near = choose(tuned), {*near_fastest(tuned)}
    gain = {number: round(rate / rates[1], 3) for number, rate in rates.items()} if 1 in rates else {}
    again: dict[int, list[Measurement]] = {}
    for _ in range(ROUNDS if len(near) > 1 else 1):
        for number in sorted({chosen, *near}):
            one = report.measure(fork_server, run, "second", number, LONGER * steps)
            again.setdefault(number, []).extend([] if one.refused else [one])
    second = {number: statistics.median(one.units_per_second for one in own) for number, own in again.items() if own}
    choice: dict[str, Any] = {"model": run.name, "chosen": chosen, "rates": rates, "gain": gain, "second": second}
    if chosen in second:
        choice["chosen_below_best"] = round(1 - second[chosen] / max(second.values()), 4)
    report.choices.append(choice)
    report.say(json.dumps(choice))


@contextmanager
def without_mps() -> Iterator[None]:
    """A context in which MPS's program is not found, so that ranks take turns on a GPU, with a warning."""
    before = os.environ["PATH"]
    with tempfile.TemporaryDirectory() as folder:
        places = []
        for number, place in enumerate(before.split(os.pathsep)):
            if (Path(place) / CONTROL).exists():  # a copy of the folder, without it
                copy = Path(folder) / str(number)
                copy.mkdir()
                for program in Path(place).iterdir():
                    if program.name != CONTROL:
                        (copy / program.name).symlink_to(program)
                place = str(copy)
            places.append(place)
        os.environ["PATH"] = os.pathsep.join(places)
        try:
            yield
        finally:
            os.environ["PATH"] = before


def main() -> None:
    parser = harness.options(__doc__, "ranks-per-device-h200.json", "small models; needs --out")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=190.0)
    options = parser.parse_args()
    if options.tiny and options.out == RESULT:
        parser.error("--tiny needs --out: its numbers say nothing")
    report = Report(options.out, options.seconds)
    start = command_fork_server(lambda arguments: app(arguments, standalone_mode=False))
    with tempfile.TemporaryDirectory() as folder, start as fork_server:
        runs = {name: read_run(name, Path(folder), options.tiny) for name in options.models}
        report.say("begins")
        for run, steps in runs.values():
            compare(report, fork_server, run, steps, 2 if options.tiny else 4)
        run, steps = next(iter(runs.values()))
        with without_mps():
            report.measure(fork_server, run, "time slicing", 2, steps)
        report.measure(fork_server, replace(run, roles=Roles(loader=3)), "3 loaders", 1, steps)
        for name in ("loading", "cnn"):
            if name in runs and not options.tiny:
                run, steps = runs[name]
                eager = replace(run, train=replace(run.train, graph=False))
                report.measure(fork_server, eager, "without a CUDA graph", 1, steps)


if __name__ == "__main__":
    main()
