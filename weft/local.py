"""Runs a function on local ranks: forked processes joined by Gloo through a file, without ports or pickles.

Forking after torch is imported starts eight ranks in a fraction of a second, so the verifier, the tests and
`weft doctor` all use it. Results come back as JSON. Nothing hangs: after `timeout_seconds` all ranks are ended and the
error says for each rank that still ran what it waited for, with its stack.
"""

from __future__ import annotations

import faulthandler
import json
import os
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from weft.comm import meet
from weft.errors import WeftError
from weft.status import wait_for_stacks

_STACK_SECONDS = 10.0  # at most, for ranks that hang to say where


class LocalError(WeftError):
    """A local rank failed, died or hung; the message names it."""


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    text: bytes = b""
    done: bool = False
    status: int | None = None


def run_local(function: Callable[[int], Any], num_ranks: int, timeout_seconds: float = 60.0) -> list[Any]:
    """`function(rank)` on `num_ranks` local processes; what each returns (as JSON) in the order of ranks."""
    with tempfile.TemporaryDirectory(prefix="weft-local-") as folder:
        sys.stdout.flush()
        sys.stderr.flush()
        children = [_fork(function, rank, num_ranks, Path(folder), timeout_seconds) for rank in range(num_ranks)]
        try:
            _collect(children, time.monotonic() + timeout_seconds)
            if not all(child.done for child in children):
                raise LocalError(_describe_hang(children, Path(folder), timeout_seconds))
            return [_result(child) for child in children]
        finally:
            for child in children:
                if not child.done:
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                os.close(child.pipe)


def _fork(function: Callable[[int], Any], rank: int, num_ranks: int, folder: Path, timeout_seconds: float) -> _Child:
    read, write = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write)
        return _Child(rank, pid, read)
    status = 1
    try:
        os.close(read)
        answer = _child(function, rank, num_ranks, folder, timeout_seconds)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer)
        status = 0 if answer.startswith(b'{"result"') else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def _child(function: Callable[[int], Any], rank: int, num_ranks: int, folder: Path, timeout_seconds: float) -> bytes:
    """The answer as JSON: the function's result, or the error that it ended with and when."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            torch.set_num_threads(1)
            if torch.backends.mkldnn.is_acl_available():  # on ARM: it would wait for threads that are not forked
                torch.backends.mkldnn.set_flags(_enabled=False)
            if torch.cuda._is_in_bad_fork():
                _hide_accelerators()
            if num_ranks > 1:
                dist.init_process_group(
                    "gloo",
                    store=FileStore(str(folder / "store"), num_ranks),
                    rank=rank,
                    world_size=num_ranks,
                    timeout=timedelta(seconds=timeout_seconds + 30),
                )
                meet()  # a rank that ends at once would break off others that are still connecting to it
            return json.dumps({"result": function(rank)}).encode()
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
            if "fork-based multiprocessing" in text:
                text += "; this process has computed gradients on a GPU: call it before that, or use `weft verify`"
            return json.dumps({"error": text, "trace": traceback.format_exc(), "at": time.monotonic()}).encode()


def _hide_accelerators() -> None:
    """A forked process cannot use CUDA that its parent has touched, and optimizers ask about it even on a CPU."""
    torch.cuda.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _collect(children: list[_Child], deadline: float) -> None:
    """Read answers until all ranks ended, one failed (the others would wait for it in vain), or time is up."""
    failed: list[_Child] = []
    while not all(child.done for child in children):
        open_pipes = {child.pipe: child for child in children if not child.done}
        patience = 0.0 if failed else max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select(list(open_pipes), [], [], patience)
        if not ready:
            break
        for pipe in ready:
            child = open_pipes[pipe]
            chunk = os.read(pipe, 1 << 20)
            child.text += chunk
            if not chunk:
                child.status = os.waitstatus_to_exitcode(os.waitpid(child.pid, 0)[1])
                child.done = True
                if child.status != 0:
                    failed.append(child)
    if failed:  # the first to fail is the cause; others may have failed because they lost it
        _result(min(failed, key=_failed_at))


def _has_answered(child: _Child) -> bool:
    return child.status in (0, 1) and bool(child.text)  # a killed rank may have left half an answer


def _failed_at(child: _Child) -> float:
    return float(json.loads(child.text)["at"]) if _has_answered(child) else 0.0


def _result(child: _Child) -> Any:
    if not _has_answered(child):
        raise LocalError(f"rank {child.rank} died with status {child.status} and left no answer")
    answer = json.loads(child.text)
    if "error" in answer:
        raise LocalError(f"rank {child.rank} failed: {answer['error']}\n{answer['trace']}")
    return answer["result"]


def _describe_hang(children: list[_Child], folder: Path, timeout_seconds: float) -> str:
    waiting = [child for child in children if not child.done]
    for child in waiting:
        os.kill(child.pid, signal.SIGUSR1)
    paths = [folder / f"stack-{child.rank}" for child in waiting]
    wait_for_stacks(paths, _STACK_SECONDS)
    said = [path.read_text() if path.exists() else "" for path in paths]  # none of one that has not come to register
    stacks = [f"rank {child.rank}:\n{text}" for child, text in zip(waiting, said, strict=True)]
    names = ", ".join(str(child.rank) for child in waiting)
    return f"no answer from rank(s) {names} of {len(children)} after {timeout_seconds:g} s\n" + "\n".join(stacks)
