"""Runs a function on local ranks: processes that Gloo or NCCL joins through a file store, without ports or pickles.

Forking after torch is imported starts eight ranks in a fraction of a second, so the verifier, the tests and
`weft doctor` all use it. A process whose forked children could not compute (`weft/launch/fork.py`) starts new processes
instead (`run_spawned`), which import the function by a name like 'module:function' or 'file.py:function'. Results are
returned as JSON. Nothing hangs: after `timeout_seconds` all ranks are killed, and the error contains the stack of each
rank that still ran.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import runpy
import select
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from weft.cluster.local_gpus import VISIBLE_VARIABLE
from weft.comm import barrier
from weft.comm.backends import DeviceType, choose_backend, prepare_cuda
from weft.errors import LaunchError, LocalError, PlanError, error_class
from weft.health.call_order import FOLDER_VARIABLE as CALLS_VARIABLE
from weft.health.call_order import find_difference
from weft.health.rank_status import wait_for_stacks
from weft.launch.fork import fork

__all__ = ["LocalError", "run_local", "run_spawned"]

_COMPARE_SECONDS = 2.0  # how often collectives are compared
_STACK_SECONDS = 10.0  # the longest time to wait for the stacks of ranks that hang
Start = Callable[
    ["_LocalRank", int], int
]  # starts a rank that writes its answer to the file descriptor; returns its pid


@dataclass(frozen=True)
class _LocalRank:
    """The rank of a local process, the number of ranks, the folder of their store, and the device they compute on."""

    rank: int
    num_ranks: int
    folder: Path
    timeout_seconds: float
    device: DeviceType
    compares: bool  # Are the ranks' collectives compared?


@dataclass
class _Child:
    rank: int
    pid: int
    pipe: int
    text: bytes = b""
    done: bool = False
    status: int | None = None


def run_local(
    function: Callable[[int], Any],
    num_ranks: int,
    timeout_seconds: float = 300.0,
    device: DeviceType = "cpu",
    own_errors: bool = False,
) -> list[Any]:
    """Run `function(rank)` on `num_ranks` forked processes and return their results (as JSON) in the order of ranks.

    With device "cuda", ranks share this machine's GPUs, and each rank's current device is set. Fails in a process in
    which CUDA is initialised or a backward has run on a machine with GPUs; use `run_spawned` there.

    A rank that fails raises LocalError with its stack. With `own_errors`, an error of weft's is raised as itself, and
    so is a difference between the ranks' collectives (`health/call_order.py`).
    """

    return _run(_forked(function), num_ranks, timeout_seconds, device, own_errors)


def _forked(function: Callable[[int], Any]) -> Start:
    def start(local_rank: _LocalRank, write: int) -> int:
        pid = fork()
        if not pid:
            _serve(local_rank, write, lambda: function(local_rank.rank))
        return pid

    return start


def run_spawned(
    entry: str,
    arguments: Mapping[str, Any],
    num_ranks: int,
    timeout_seconds: float = 300.0,
    device: DeviceType = "cpu",
    own_errors: bool = False,
) -> list[Any]:
    """Run a function as `function(rank, **arguments)` on new processes and return their results in the order of ranks.

    `entry` is 'module:function'; the arguments must be values that JSON can represent. This works in any process and
    is slower than `run_local` by the time that importing torch takes.
    """
    order = {"entry": entry, "arguments": dict(arguments)}

    def start(local_rank: _LocalRank, write: int) -> int:
        path = local_rank.folder / f"order-{local_rank.rank}.json"
        where = {"rank": local_rank.rank, "num_ranks": local_rank.num_ranks, "folder": str(local_rank.folder)}
        where |= {"timeout_seconds": local_rank.timeout_seconds, "device": local_rank.device}
        where |= {"compares": local_rank.compares}
        path.write_text(json.dumps({**order, "local_rank": where, "write": write}))
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        os.set_inheritable(write, True)
        return os.posix_spawn(sys.executable, [sys.executable, "-m", "weft.launch.local_ranks", str(path)], environ)

    return _run(start, num_ranks, timeout_seconds, device, own_errors)


def _run(start: Start, num_ranks: int, timeout_seconds: float, device: DeviceType, own_errors: bool) -> list[Any]:
    with tempfile.TemporaryDirectory(prefix="weft-local-") as name:
        folder = Path(name)
        children = [
            _start(start, _LocalRank(rank, num_ranks, folder, timeout_seconds, device, own_errors))
            for rank in range(num_ranks)
        ]
        try:
            _collect(children, time.monotonic() + timeout_seconds, folder)
            if not all(child.done for child in children):
                raise LocalError(_describe_hang(children, folder, timeout_seconds))
            return [_result(child) for child in children]
        except LocalError as error:
            if own_errors and error.__cause__ is not None:
                raise error.__cause__ from None
            raise
        finally:
            for child in children:
                if not child.done:
                    os.kill(child.pid, signal.SIGKILL)
                    os.waitpid(child.pid, 0)
                os.close(child.pipe)


def _start(start: Start, local_rank: _LocalRank) -> _Child:
    read, write = os.pipe()
    pid = start(local_rank, write)
    os.close(write)
    return _Child(local_rank.rank, pid, read)


# --- in a rank


def _serve(local_rank: _LocalRank, write: int, function: Callable[[], Any]) -> None:
    """Run a rank: write its answer to the file descriptor `write` and exit."""
    status = 1
    try:
        answer = _answer(local_rank, function)
        with os.fdopen(write, "wb") as pipe:
            pipe.write(answer)
        status = 0 if answer.startswith(b'{"result"') else 1
    finally:
        sys.stdout.flush()
        os._exit(status)


def _answer(local_rank: _LocalRank, function: Callable[[], Any]) -> bytes:
    """Join the other ranks and call the function. Returns JSON: its result, or its error and the error's time."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    with open(local_rank.folder / f"stack-{local_rank.rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, stack, all_threads=False)
        try:
            if local_rank.compares:
                os.environ[CALLS_VARIABLE] = str(local_rank.folder)
            torch.set_num_threads(1)
            if torch.backends.mkldnn.is_acl_available():  # on ARM it would wait for threads that the fork did not copy
                torch.backends.mkldnn.set_flags(_enabled=False)
            _join(local_rank, _take_device(local_rank))
            return json.dumps({"result": function()}).encode()
        except BaseException as error:
            kind, text = type(error).__name__, str(error)
            trace, at = traceback.format_exc(), time.monotonic()
            return json.dumps({"error": kind, "text": text, "trace": trace, "at": at}).encode()


def _take_device(local_rank: _LocalRank) -> torch.device | None:
    """Set and return this rank's GPU. For CPU ranks return None and hide all GPUs, because libraries query them and
    each rank would initialise CUDA.
    """
    if local_rank.device == "cuda":
        prepare_cuda(local_rank.num_ranks)
        device = torch.device("cuda", local_rank.rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        return device
    if torch.cuda._is_in_bad_fork():
        _hide_accelerators()
    else:
        os.environ[VISIBLE_VARIABLE] = ""
    return None


def _hide_accelerators() -> None:
    """Make torch report no accelerator. A forked process cannot use CUDA that its parent has initialised, and
    optimizers query CUDA even on a CPU.
    """
    torch.cuda.is_available = lambda: False
    torch.accelerator.current_accelerator = lambda check_available=False: None


def _join(local_rank: _LocalRank, device: torch.device | None) -> None:
    if local_rank.num_ranks == 1:
        return
    backend = choose_backend(local_rank.device, local_rank.num_ranks)
    dist.init_process_group(
        backend,
        store=FileStore(str(local_rank.folder / "store"), local_rank.num_ranks),
        rank=local_rank.rank,
        world_size=local_rank.num_ranks,
        timeout=timedelta(seconds=local_rank.timeout_seconds + 30),
        device_id=device if "nccl" in backend else None,
    )
    barrier()  # without it, a rank that exits at once would break connections that other ranks still open to it


# --- in the parent process


def _collect(children: list[_Child], deadline: float, folder: Path) -> None:
    """Read answers until all ranks have exited, one has failed (the others would wait for it), or time is up.

    Raises an error, too, if ranks have made different collectives.
    """
    failed: list[_Child] = []
    while not all(child.done for child in children):
        open_pipes = {child.pipe: child for child in children if not child.done}
        patience = 0.0 if failed else min(_COMPARE_SECONDS, max(0.0, deadline - time.monotonic()))
        ready, _, _ = select.select(list(open_pipes), [], [], patience)
        if not ready:
            _compare_calls(folder, len(children))
            if failed or time.monotonic() >= deadline:
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
    own = [child for child in failed if _own_error(child) is not None]
    if not own:  # otherwise that error is the reason
        _compare_calls(folder, len(children))
    if failed:  # report the first rank that failed; others may have failed because they lost it
        _result(min(own or failed, key=_failed_at))


def _compare_calls(folder: Path, num_ranks: int) -> None:
    difference = find_difference(folder, num_ranks)
    if difference is not None:
        raise LocalError(difference) from PlanError(difference)


def _has_answered(child: _Child) -> bool:
    return child.status in (0, 1) and bool(child.text)  # a killed rank may have written an incomplete answer


def _own_error(child: _Child) -> Exception | None:
    """The error of weft's that ended a rank, if one did."""
    if not _has_answered(child):
        return None
    answer = json.loads(child.text)
    kind = error_class(answer.get("error", ""))
    return None if kind is None else kind(answer["text"])


def _failed_at(child: _Child) -> float:
    return float(json.loads(child.text)["at"]) if _has_answered(child) else 0.0


def _result(child: _Child) -> Any:
    if not _has_answered(child):
        raise LocalError(f"rank {child.rank} died with status {child.status} and left no answer")
    answer = json.loads(child.text)
    if "error" in answer:
        text = f"rank {child.rank} failed: {answer['error']}: {answer['text']}\n{answer['trace']}"
        raise LocalError(text) from _own_error(child)
    return answer["result"]


def _describe_hang(children: list[_Child], folder: Path, timeout_seconds: float) -> str:
    waiting = [child for child in children if not child.done]
    for child in waiting:
        os.kill(child.pid, signal.SIGUSR1)
    paths = [folder / f"stack-{child.rank}" for child in waiting]
    wait_for_stacks(paths, _STACK_SECONDS)
    texts = [path.read_text() if path.exists() else "" for path in paths]  # no file if the rank had not registered yet
    stacks = [f"rank {child.rank}:\n{text}" for child, text in zip(waiting, texts, strict=True)]
    names = ", ".join(str(child.rank) for child in waiting)
    return f"no answer from rank(s) {names} of {len(children)} after {timeout_seconds:g} s\n" + "\n".join(stacks)


def _main() -> None:
    """Run a rank of `run_spawned`: `python -m weft.launch.local_ranks ORDER.json`."""
    order = json.loads(Path(sys.argv[1]).read_text())
    where = order["local_rank"]
    local_rank = _LocalRank(**{**where, "folder": Path(where["folder"])})
    _serve(local_rank, order["write"], lambda: import_by_name(order["entry"])(local_rank.rank, **order["arguments"]))


if __name__ == "__main__":
    _main()


SCRIPT = "__weft_script__"  # __name__ while a script is run again for its functions


def importable_name(function: Callable[..., Any], what: str) -> str:
    """Returns the name with which `import_by_name` finds the function in another process.

    `what` names the argument in an error. Raises LaunchError if another process cannot import the function.
    """
    module, name = getattr(function, "__module__", None), getattr(function, "__qualname__", "")
    program = sys.modules.get("__main__")
    file, spec = getattr(program, "__file__", None), getattr(program, "__spec__", None)
    if module == "__main__" and spec is not None:  # started as `python -m module`
        module = spec.name
    if module is None or not name or "<" in name or "." in name or (module == "__main__" and file is None):
        raise LaunchError(
            f"{what} = {function!r} cannot be imported by another process, which this one needs: it has used CUDA, or "
            f"a backward on a machine with GPUs, and cannot fork ranks; define {what} with `def` at the top level of a "
            f"file, or call weft.verify in a program of its own before anything else"
        )
    return f"{file if module == '__main__' else module}:{name}"


def import_by_name(name: str) -> Any:
    """Import the function or other value that `importable_name` named."""
    place, _, attribute = name.rpartition(":")
    if Path(place).is_file():
        return _script(place)[attribute]
    return getattr(importlib.import_module(place), attribute)


@lru_cache
def _script(path: str) -> dict[str, Any]:
    """Run a script and return its globals. Code under `if __name__ == "__main__"` does not run."""
    return runpy.run_path(path, run_name=SCRIPT)
