"""`weft serve` on local ranks as a process, over a tiny run whose checkpoints are written here, one with each seed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import torch
from serve_for_tests import LIMIT_SECONDS, wait_for

from weft.checkpoint import Piece, Saver
from weft.checkpoint.region import Region
from weft.models import DecoderConfig, build, initialise
from weft.schema import to_table

ROOT = Path(__file__).parents[2]
CONFIG = DecoderConfig(
    vocab_size=257,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
RUN = 'folder = "run"\n[data]\nsource = "stdlib"\nsequence = 64\ntokenizer = "bytes"\n'
BODY = {"prompt": "abc def ", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
# The command, with fewer restarts, and with ranks that count as hung sooner.
PROGRAM = (
    "from weft.launch.agent import Restarts; from weft.serve.http import local_ranks_server as server, run_server; "
    "server.RESTARTS = Restarts(limit={limit}, hang_seconds={hang_seconds}); "
    "run_server.HANG_SECONDS = {hang_seconds}; "
    "from weft.commands.main import run; run()"
)


def save_step(run: Path, step: int, value: float | None = None) -> Path:
    """Save a checkpoint of a run: random values that the step seeds, and `value` in one place. Returns its folder."""
    model = build(CONFIG)
    initialise(model, step)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(step)) * 0.3)
        if value is not None:
            next(iter(model.parameters())).view(-1)[-1] = value
    whole, named = Region.whole, model.named_parameters()
    pieces = [Piece(name, "parameter", whole(tuple(one.shape)), one.detach()) for name, one in named]
    state = {"model": to_table(CONFIG), "run": RUN}
    Saver(run / "checkpoints", 0, 1, "abcd").save(step, pieces, state, asynchronous=False)
    return run / "checkpoints" / f"step-{step:08d}"


def damage(checkpoint: Path, file: str = "rank-00000.safetensors") -> None:
    """Flip a bit of a checkpoint."""
    content = bytearray((checkpoint / file).read_bytes())
    content[-5] ^= 1
    (checkpoint / file).write_bytes(content)


def ranks_of(process: int) -> list[int]:
    """The processes that a local job's ranks are, in their order: they have started none themselves."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            children.setdefault(int(path.read_text().rpartition(")")[2].split()[1]), []).append(int(path.parent.name))
    found, waiting = list[int](), [process]
    while waiting:
        one = waiting.pop()
        waiting += children.get(one, [])
        found += [one] * (one not in children)
    return sorted(found)


class ServedRanks:
    """A server on ranks: its process, its address, and what it has said so far."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, url: str) -> None:
        self.process, self.url, self._log = process, url, log

    @property
    def said(self) -> str:
        return self._log.read_text()

    def ask(self, seconds: float = LIMIT_SECONDS) -> httpx.Response:
        return httpx.post(f"{self.url}/v1/completions", json=BODY, timeout=seconds, verify=False)

    def ask_if_it_answers(self, seconds: float = LIMIT_SECONDS) -> int:
        """The status of an answer; 0 if the connection ends without one."""
        try:
            return self.ask(seconds).status_code
        except httpx.HTTPError:
            return 0

    def text(self) -> str:
        found: str = self.ask().json()["choices"][0]["text"]
        return found

    def health(self) -> tuple[int, str]:
        """The status of /health and the weights that it names; 0 if there is no answer."""
        with suppress(httpx.HTTPError, ValueError):
            found = httpx.get(f"{self.url}/health", timeout=LIMIT_SECONDS, verify=False)
            return found.status_code, found.json().get("weights", "")
        return 0, ""

    def wait_for_weights(self, step: int) -> None:
        wait_for(lambda: self.health() == (200, f"step-{step:08d}"))

    def ranks(self) -> list[int]:
        return ranks_of(self.process.pid)

    def kill(self, rank: int, number: int) -> None:
        """Send a signal to a rank."""
        os.kill(self.ranks()[rank], number)


@contextmanager
def server_process(
    folder: Path, *options: str, program: Sequence[str] = ("-m", "weft"), stderr: Any = None, **environ: str
) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """Run `weft serve` on a folder as a process, until the block ends. Yields it with what it says when it is ready.
    `program` is what Python runs: weft, or a launcher of it.
    """
    words = [sys.executable, *program, "serve", str(folder), "--port", "0", "--json", "--device", "cpu", *options]
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    own = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **environ}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=stderr, env=own) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            assert line, "the server ended before it was ready"
            yield process, json.loads(line)
        finally:
            is_torchrun = "torch.distributed.run" in program  # which does not end its ranks when it is killed
            for one in (*ranks_of(process.pid), process.pid) if is_torchrun else ():
                with suppress(ProcessLookupError):
                    os.kill(one, signal.SIGKILL)
            process.kill()


@contextmanager
def served_ranks(
    run: Path,
    *options: str,
    limit: int = 5,
    hang_seconds: float = 60.0,
    program: str = "",
    launcher: Sequence[str] = (),
) -> Iterator[ServedRanks]:
    """Serve a run until the block ends; `program` is Python that runs first, in all its processes. The words of a
    `launcher` start it.
    """
    log = run.parent / f"{run.name}.log"
    words = ["-c", program + PROGRAM.format(limit=limit, hang_seconds=hang_seconds)]
    words = [*launcher, sys.executable, *words] if launcher else words
    with log.open("wb") as err:
        try:
            with server_process(run, *options, program=words, stderr=err) as (process, about):
                yield ServedRanks(process, log, about["url"])
        except BaseException:
            print(log.read_text(), file=sys.stderr)
            raise
