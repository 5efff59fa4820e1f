"""Compares what `weft plan --serve` predicts for decodes on a CPU with decodes on this CPU, measured in the same run.

    python benchmarks/cpu_planned.py                    an hour; writes benchmarks/results/cpu-planned.json
    python benchmarks/cpu_planned.py --real-time        on a machine that others use (root): nothing interrupts timings
    python benchmarks/cpu_planned.py --quiet            on a virtual machine whose host others use: times when they rest
    python benchmarks/cpu_planned.py --threads 2        with another number of threads than one
    python benchmarks/cpu_planned.py --tiny             a tiny model, to try the benchmark itself; nothing is written

The machine is measured before and after the rows of each model, as `weft bench machine --serve` does, and a prediction
is the mean of what both say. A measured time is the median of three bursts of a decode's steps, each of which is a
median, too; of recurrent models, that of some copies in other places of memory. What is measured of the machine has no
part of these models. Times are those that the main thread has a core; of several rounds the medians count. Weights are
random. Searches for likely tokens are in a random matrix of low rank; their counts are those of other states than those
timed.

With --quiet, each piece of the measurement and each burst begins when a read of memory and a small product take at most
15 % more than the least that they took so far, or after a minute. The result says how often it did not become quiet.
If others are busy for long, give what the probes take when they rest: --least 0.0055 0.0018.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from time import thread_time as clock
from typing import Any

import harness
import torch
from serve_cpu import LLAMA_200M
from serve_gpu import TINY
from torch import nn

from weft.architectures import GPT2Config, LanguageConfig, RecurrentConfig
from weft.cluster.decode_rates import DecodeRates
from weft.models import DecoderConfig, build
from weft.models.recurrent import RecurrentModel
from weft.planner.serving_cpu import predict_decode
from weft.schema import build_dataclass
from weft.serve.cpu_costs import CpuCosts
from weft.serve.engine import Engine, EngineOptions
from weft.serve.head.graph_head import GraphHead, build_graph
from weft.serve.measurement.measure_decode import measure_decode
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.packed_linear import pack_head, pack_model
from weft.serve.weights.weight_formats import FORMATS

LLAMA_60M = DecoderConfig(
    vocab_size=16384,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=12,
    num_attention_heads=8,
    max_position_embeddings=256,
)
GPT2 = GPT2Config(n_positions=256, tie_word_embeddings=False)
QUIET_SHARE, QUIET_SECONDS = 1.15, 60.0
PROMPT, NUM_BURSTS, NUM_STEPS, REST_SECONDS = 16, 3, 9, 0.25
# What a cache holds of a small model depends on where its weights lie: one of 38 MB took 3.0 to 3.5 ms.
NUM_PLACES = 5
# dtype, --weights, --head
WAYS: tuple[tuple[str, str | None, str | None], ...] = (
    ("float32", None, None),
    ("bfloat16", None, None),
    *(("float32", name, None) for name in FORMATS if name not in ("fp8", "int4-128")),
    ("float32", "int8", "int8"),
    ("float32", "int4", "int8"),
    ("float32", "int4", "int4"),
    *(("float32", name, name) for name in FORMATS if name == "int8-row"),
)
PLAIN, SOME = WAYS[:1], (*WAYS[:4], *WAYS[-2:])
MANY_ROWS = 16
Row = tuple[str, float, Callable[[DecodeRates], float]]  # what, measured seconds, how they are predicted


def language_model(config: Any) -> nn.Module:
    with torch.device("meta"):
        model = build(config)
    model = model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        parameter.fill_(1.0) if parameter.dim() == 1 else parameter.normal_(0.0, 0.02, generator=generator)
    return model


def decode_seconds(model: nn.Module, timed: Callable[[], Any]) -> float:
    """The median of some bursts of a decode's steps, each of which is a median, too."""
    engine = Engine(model, EngineOptions(max_running=1, num_blocks=16, prefix_cache=False))
    engine.add(Request("one", tuple(range(PROMPT)), NUM_BURSTS * NUM_STEPS + 2, Sampling(temperature=0)))
    engine.step()
    found = []
    for _ in range(NUM_BURSTS):
        with timed():
            found.append(median([_seconds(engine.step) for _ in range(NUM_STEPS)][1:]))
        time.sleep(REST_SECONDS)
    return median(found)


def _seconds(call: Callable[[], Any]) -> float:
    begin = clock()
    call()
    return clock() - begin


def decodes(name: str, config: LanguageConfig, ways: Sequence[Any], timed: Callable[[], Any]) -> Iterator[Row]:
    """Yields a row for each way to serve a model."""
    length = PROMPT + NUM_BURSTS * NUM_STEPS // 2
    num_models = NUM_PLACES if isinstance(config, RecurrentConfig) else 1
    for dtype, weights, head in ways:
        found = []
        for _ in range(num_models):
            if isinstance(config, RecurrentConfig):
                torch.manual_seed(0)
                model: nn.Module = RecurrentModel(config)
            else:
                model = language_model(config).to(getattr(torch, dtype))
            if weights is not None:
                pack_model(model, FORMATS[weights])
            pack_head(model, head, "cpu")
            found.append(decode_seconds(model, timed))
        measured = median(found)
        what = f"{name}, {weights or dtype}" + (f", head {head}" if head else "")

        def predict(rates: DecodeRates, given: Any = (config, dtype, weights, head)) -> float:
            return predict_decode(CpuCosts(*given), rates, length).seconds

        yield what, measured, predict


def searches(num_tokens: int, width: int, timed: Callable[[], Any]) -> Iterator[Row]:
    """Yields a row for each beam of a search for the likeliest tokens."""
    generator = torch.Generator().manual_seed(0)
    sizes = ((48, width), (num_tokens, 48), (120, 48))
    basis, coordinates, hidden = (torch.randn(*size, generator=generator) for size in sizes)
    weight, states = coordinates @ basis / width**0.5, hidden @ basis / width**0.5
    counted, others = states[::2], states[1::2]
    likely = (states[::3] @ weight.T).topk(10).indices
    graph = build_graph(weight, None, 32, likely)
    for beam in (64, 256, 1024):
        head = GraphHead(graph, "", beam=beam)
        found = [head.best(state, weight, None) for state in counted]
        names = ("num_scored", "num_rounds", "num_edges")
        head = replace(head, **{one: fmean(getattr(each, one) for each in found) for one in names})
        bursts = []
        for _ in range(NUM_BURSTS):
            with timed():
                bursts.append(median(_seconds(partial(head.best, state, weight, None)) for state in others))
            time.sleep(REST_SECONDS)

        def predict(rates: DecodeRates, head: GraphHead = head) -> float:
            return rates.search.seconds(head.num_rounds, head.num_edges, head.num_scored, 4 * width)

        yield f"search of {num_tokens:,} tokens of width {width}, beam {beam}", median(bursts), predict


def parts(is_tiny: bool, timed: Callable[[], Any], only_searches: bool = False) -> Iterator[Iterator[Row]]:
    """Yields the rows of each model."""
    if only_searches:
        yield searches(8192, 512, timed)
        yield searches(8192, 1024, timed)
        return
    if is_tiny:
        yield decodes("tiny Llama", TINY, WAYS, timed)
        yield searches(600, 32, timed)
        return
    yield decodes("Llama 60M", LLAMA_60M, SOME, timed)
    yield decodes("Llama 200M", LLAMA_200M, WAYS, timed)
    yield decodes("GPT-2 124M", GPT2, SOME, timed)
    for kind in ("lstm", "gru"):
        for size in (128, 256, 512, 1024):
            config = RecurrentConfig(kind, 257, size)  # type: ignore[arg-type]
            yield decodes(f"{kind.upper()} {size}, 257 tokens", config, PLAIN, timed)
    yield decodes("LSTM 512, 32,000 tokens", RecurrentConfig("lstm", 32000, 512), PLAIN, timed)
    yield decodes("GRU 1024, 32,000 tokens", RecurrentConfig("gru", 32000, 1024), PLAIN, timed)
    yield from parts(False, timed, only_searches=True)


class Quiet:
    """Waits until others rest who use the same cores and memory, by two probes: a read of memory, a small product."""

    def __init__(self, least: Sequence[float] = ()) -> None:
        self._large, self._small = torch.ones(4096, 4096), torch.ones(64, 64)
        self.least = list(least)
        self.num_waits = self.num_noisy = 0
        self.waited_seconds = 0.0
        if not least:
            self.least = [min(column) for column in zip(*(self._probe() for _ in range(50)), strict=True)]

    def _probe(self) -> tuple[float, float]:
        column, short = self._large[0], self._small[0]
        read = min(_seconds(partial(torch.mv, self._large, column)) for _ in range(2))
        return read, _seconds(lambda: [torch.mv(self._small, short) for _ in range(500)])

    def wait(self) -> None:
        start = time.monotonic()
        self.num_waits += 1
        while True:
            found = self._probe()
            self.least = [min(pair) for pair in zip(self.least, found, strict=True)]
            if all(one <= QUIET_SHARE * least for one, least in zip(found, self.least, strict=True)):
                break
            if time.monotonic() - start > QUIET_SECONDS:
                self.num_noisy += 1
                break
            time.sleep(0.2)
        self.waited_seconds += time.monotonic() - start


@contextmanager
def when_quiet(quiet: Quiet) -> Iterator[None]:
    quiet.wait()
    with real_time():
        yield


@contextmanager
def real_time() -> Iterator[None]:
    """Other processes do not interrupt this one."""
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))
    try:
        yield
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def let_others_run(quiet: Quiet | None, *_: int) -> None:
    """Between two pieces that nothing interrupts."""
    if os.sched_getscheduler(0) == os.SCHED_FIFO:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        time.sleep(REST_SECONDS)
        if quiet is not None:
            quiet.wait()
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(5))


def measure_machine(path: str, timed: Callable[[], Any], quiet: Quiet | None) -> None:
    """Write what `weft bench machine --serve` measures."""
    with timed():
        found = measure_decode(partial(let_others_run, quiet))
    Path(path).write_text(json.dumps(asdict(found)))


@contextmanager
def as_it_is() -> Iterator[None]:
    yield


def compared(
    timed: Callable[[], Any], is_tiny: bool, quiet: Quiet | None, only_searches: bool
) -> Iterator[tuple[str, float, float]]:
    """Yields what was measured, and seconds predicted by the machine before and after it and measured."""

    def machine() -> DecodeRates:
        """Measured by another process: the memory that it leaves behind would slow the models of this one."""
        with tempfile.NamedTemporaryFile("r") as file:
            option = ["--threads", str(torch.get_num_threads())]
            option += ["--real-time"] if timed is real_time else []
            option += [] if quiet is None else ["--quiet", "--least", *map(str, quiet.least)]
            subprocess.run([sys.executable, __file__, "--measure-machine", file.name, *option], check=True)
            return build_dataclass(DecodeRates, json.load(file))

    before = machine()
    rows: list[Row] = []
    for own in (*parts(is_tiny, timed, only_searches), None):
        rows += own or ()
        if len(rows) < MANY_ROWS and own is not None:  # the machine is not measured anew for each small model
            continue
        after = machine()
        for what, measured, predict in rows:
            yield what, fmean([predict(before), predict(after)]), measured
        before, rows = after, []


def summary(found: dict[str, list[tuple[float, float]]]) -> list[dict[str, Any]]:
    """A row for all rounds of each thing: the medians of what was predicted and of what was measured."""
    rows = []
    for what, pairs in found.items():
        errors = [predicted / measured - 1 for predicted, measured in pairs]
        predicted, measured = (1e3 * median(column) for column in zip(*pairs, strict=True))
        error = predicted / measured - 1
        rows.append({"what": what, "predicted_ms": predicted, "measured_ms": measured, "error": error})
        rows[-1] |= {"errors_of_rounds": errors, "measured_ms_of_rounds": [1e3 * one for _, one in pairs]}
    return rows


def write(found: dict[str, list[tuple[float, float]]], given: argparse.Namespace, quiet: Quiet | None) -> None:
    """Write what there is so far."""
    rows = summary(found)
    if given.searches:
        kept = json.loads(given.out.read_text())["rows"]
        rows = [row for row in kept if row["what"] not in found] + rows
    result = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "rounds": max(len(row["errors_of_rounds"]) for row in rows),
        "is_real_time": given.real_time or given.quiet,
        "waits_for_quiet": quiet and {"number": quiet.num_waits, "in_vain": quiet.num_noisy},
        "load_average": os.getloadavg(),
        "within_10_percent": sum(abs(row["error"]) <= 0.1 for row in rows),
        "rows": rows,
    }
    harness.write(given.out, result, device="cpu")


@torch.inference_mode()
def main() -> None:
    parser = harness.options(__doc__, "cpu-planned.json", harness.NOT_WRITTEN)
    parser.add_argument("--real-time", action="store_true", help="nothing interrupts what is timed (root)")
    parser.add_argument("--quiet", action="store_true", help="time when others rest, and nothing interrupts (root)")
    parser.add_argument("--least", type=float, nargs=2, default=(), help="the least times of the probes of --quiet")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--searches", action="store_true", help="measure searches anew; other rows stay as they were")
    parser.add_argument("--measure-machine", metavar="FILE", help="only measure the machine, and write its figures")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    quiet = Quiet(given.least) if given.quiet else None
    timed = partial(when_quiet, quiet) if quiet else real_time if given.real_time else as_it_is
    if given.measure_machine:
        measure_machine(given.measure_machine, timed, quiet)
        return
    found: dict[str, list[tuple[float, float]]] = {}
    for _ in range(given.rounds):
        for what, predicted, measured in compared(timed, given.tiny, quiet, given.searches):
            found.setdefault(what, []).append((predicted, measured))
            print(f"{what}: {1e3 * predicted:.2f} ms predicted, {1e3 * measured:.2f} measured", flush=True)
            if not given.tiny:
                write(found, given, quiet)
    print("| | predicted ms | measured ms | error |\n|---|---|---|---|")
    for row in summary(found):
        print(f"| {row['what']} | {row['predicted_ms']:.3g} | {row['measured_ms']:.3g} | {row['error']:+.0%} |")


if __name__ == "__main__":
    main()
