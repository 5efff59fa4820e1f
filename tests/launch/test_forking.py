"""Children come from processes that have run no backward and touched no GPU: on a machine with GPUs others fail."""

from __future__ import annotations

import importlib.machinery
import os
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from runs_for_tests import write_run_file

import weft
import weft.proof.prove
from weft.errors import LaunchError, LocalError, PlanError
from weft.launch import fork as forking
from weft.launch.fork_server import ForkServer
from weft.launch.local_ranks import import_by_name, importable_name, run_local, run_spawned
from weft.plan import Context, Plan, Shard

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]

# Notes every fork of a process that has run a backward, as if torch's threads for GPUs had started there: children of a
# process start without that mark, unless they are forked from such a one.
AUDIT = """
import os, sys
import torch
ran = []
whole = torch.autograd.graph._engine_run_backward

def engine(*args, **kwargs):
    ran.append(True)
    return whole(*args, **kwargs)

def audit(event, args):
    if event == "os.fork" and ran:
        with open({log!r}, "a") as file:
            import traceback
            file.write("forked behind a backward\\n" + "".join(traceback.format_stack()))

torch.autograd.graph._engine_run_backward = engine
torch.autograd._engine_run_backward = engine
torch._tensor.torch.autograd.graph._engine_run_backward = engine
sys.addaudithook(audit)
"""
COMMAND = """
from weft.commands.main import main
sys.argv = ["weft", *{arguments!r}]
try:
    main()
finally:
    print("has run a backward here:", bool(ran))
"""


def audited(folder: Path, code: str, **values: object) -> tuple[str, str]:
    """What a program prints, and what was noted of its forks."""
    log = folder / "forks"
    program = (AUDIT + code).format(log=str(log), **values)
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'helpers'}"}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=folder, env=environ, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, log.read_text() if log.exists() else ""


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["train", "tiny.toml", "train.steps=3"], marks=pytest.mark.soak),  # planned; trained by one rank
        ["train", "tiny.toml", "train.steps=3", "plan.data=2", "plan.micro_batch=2", "plan.memory.recompute=full"],
        pytest.param(["verify", "tiny.toml", "plan.shard=2", "plan.micro_batch=2"], marks=pytest.mark.soak),
        ["doctor", "--json"],
    ],
)
def test_commands_fork_behind_no_backward(arguments: list[str], tmp_path: Path) -> None:
    write_run_file(tmp_path)
    out, forks = audited(tmp_path, COMMAND, arguments=arguments)
    assert "has run a backward here" in out
    assert forks == ""


def test_a_fork_behind_a_backward_is_noted(tmp_path: Path) -> None:
    """The control: what `weft train` did before the fork server proved plans."""
    code = """
torch.ones(1, requires_grad=True).sum().backward()
from weft.launch.local_ranks import run_local
assert run_local(lambda rank: rank, 2) == [0, 1]
"""
    assert "forked behind a backward" in audited(tmp_path, code)[1]


def test_the_verifier_forks_behind_no_backward(tmp_path: Path) -> None:
    code = """
sys.path.insert(0, {tests!r})
import weft
from models_for_tests import tied_decoder, token_batch
plan = weft.Plan(shard=weft.Shard(2, 3), memory=weft.Memory("full"), micro_batch=2)
weft.verify(tied_decoder, token_batch, plan).require()
"""
    assert audited(tmp_path, code, tests=str(ROOT / "tests"))[1] == ""


THREADS = """
import os, sys, time
import torch
from weft.launch import fork as forking
if {skips!r}:
    forking.end_openmp_threads = lambda: None
def compute():
    torch.set_num_threads(2)
    matrix = torch.ones(800, 800)
    return float((matrix @ matrix).sum() + torch.ones(4_000_000).exp().sum())
wanted = compute()
child = forking.fork()
if child == 0:
    os._exit(compute() != wanted)
until = time.monotonic() + {seconds}
while time.monotonic() < until:
    ended, status = os.waitpid(child, os.WNOHANG)
    if ended:
        print("ended", os.waitstatus_to_exitcode(status), compute() == wanted)
        break
    time.sleep(0.02)
else:
    os.kill(child, 9)
    print("waits")
"""


def test_a_child_computes_with_threads_as_its_parent_did(tmp_path: Path) -> None:
    assert audited(tmp_path, THREADS, skips=False, seconds=60)[0].split() == ["ended", "0", "True"]


@pytest.mark.skipif(not forking._loaded_libraries("libgomp"), reason="torch uses another OpenMP here")
def test_with_its_parents_openmp_threads_it_would_wait_for_ever(tmp_path: Path) -> None:
    """The control."""
    assert audited(tmp_path, THREADS, skips=True, seconds=2)[0].split() == ["waits"]


# --- processes that cannot fork


def model() -> torch.nn.Module:
    from models_for_tests import tied_decoder

    return tied_decoder()


def batch(step: int) -> tuple[torch.Tensor, ...]:
    from models_for_tests import token_batch

    return token_batch(step)


PLAN = Plan(shard=Shard(2, 3), micro_batch=2)


@pytest.fixture
def _cannot_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forking, "_thread_names", lambda: ["python", "pt_autograd_0"])


@pytest.mark.usefixtures("_cannot_fork")
def test_a_process_whose_backward_has_threads_forks_nothing() -> None:
    with pytest.raises(LaunchError, match="torch's backward has started its threads here"):
        run_local(lambda rank: rank, 2)
    with pytest.raises(LaunchError, match="start them before that"):
        ForkServer(lambda arguments: None)


def test_a_process_that_uses_cuda_forks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(LaunchError, match="CUDA is initialised here"):
        run_local(lambda rank: rank, 1)


@pytest.mark.usefixtures("_cannot_fork")
def test_it_proves_plans_with_fresh_processes_that_import_its_functions() -> None:
    weft.verify(model, batch, PLAN).require()


@pytest.mark.usefixtures("_cannot_fork")
def test_a_function_that_no_other_process_can_import_is_refused() -> None:
    with pytest.raises(LaunchError, match=r"model_fn = <function .*<lambda>.* cannot be imported by another process"):
        weft.verify(lambda: model(), batch, PLAN)


@pytest.mark.usefixtures("_cannot_fork")
def test_fresh_processes_refuse_what_forked_ones_refuse() -> None:
    with pytest.raises(PlanError, match="does not divide into 2 × context = 4 equal parts"):
        weft.verify(model, batch, Plan(context=Context(2)))


def fail(rank: int, where: int) -> int:
    if rank == where:
        raise ValueError("on purpose")
    return rank


def test_spawned_ranks_answer_or_say_who_failed() -> None:
    assert run_spawned("test_forking:fail", {"where": 5}, 2) == [0, 1]
    with pytest.raises(LocalError, match="rank 1 failed: ValueError: on purpose"):
        run_spawned("test_forking:fail", {"where": 1}, 2)


def test_functions_have_names_that_find_them_again(tmp_path: Path) -> None:
    assert import_by_name(importable_name(model, "model")) is model
    script = tmp_path / "script.py"
    script.write_text("def make():\n    return 5\nif __name__ == '__main__':\n    raise SystemExit(1)\n")
    assert import_by_name(f"{script}:make")() == 5


def test_a_function_of_a_program_is_named_by_its_module_or_its_file(monkeypatch: pytest.MonkeyPatch) -> None:
    program = types.ModuleType("__main__")
    program.__file__ = "/somewhere/prove"

    def make() -> None: ...

    make.__module__, make.__qualname__ = "__main__", "make"
    monkeypatch.setitem(sys.modules, "__main__", program)
    assert importable_name(make, "make") == "/somewhere/prove:make"
    program.__spec__ = importlib.machinery.ModuleSpec("package.prove", None)  # python -m package.prove
    assert importable_name(make, "make") == "package.prove:make"


def test_a_fork_waits_until_other_threads_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([True, True, False])
    monkeypatch.setattr(forking, "is_another_running", lambda: next(answers))
    assert run_local(lambda rank: rank, 1) == [0]
    assert list(answers) == []


def test_a_thread_that_computes_is_seen_and_one_that_rests_is_not() -> None:
    """A thread that computes could hold a lock of a library, for which a forked child would wait for ever."""
    has_seen, ends = threading.Event(), threading.Event()

    def compute() -> None:
        matrix = torch.ones(500, 500)
        while not has_seen.is_set():
            matrix @ matrix
        ends.wait()

    thread = threading.Thread(target=compute)
    thread.start()
    assert wait_until(forking.is_another_running)
    has_seen.set()
    assert wait_until(lambda: not forking.is_another_running())
    ends.set()
    thread.join()


def wait_until(condition: Callable[[], bool]) -> bool:
    """Whether the condition comes true in a minute."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.001)
    return False
