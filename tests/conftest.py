"""What all tests share: one thread, because the distributed ones fork; soak tests, which run when asked for; a marker
for tests that start processes, which `make check` leaves out.

Folders are those of weft/, and `helpers`, which hold all that tests share: no test imports another.
"""

from __future__ import annotations

import atexit
import gc
import os
import platform
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

HELPERS = str(Path(__file__).parent / "helpers")
sys.path[:0] = [] if HELPERS in sys.path else [HELPERS]
# Started in the background, a process ignores Ctrl-C and so do its children, which some tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _prepare_torch() -> None:
    import torch
    import torch._dynamo  # optimizers and fake tensors import it: here, once, and not in every forked rank

    torch.set_num_threads(1)
    if torch.backends.mkldnn.is_acl_available():  # on ARM, where forked processes would wait for its threads
        torch.backends.mkldnn.set_flags(_enabled=False)


def pytest_configure(config: pytest.Config) -> None:
    """How long an example takes depends on what else the machine does, and is no reason to fail. Which are tried comes
    from the test alone, so that what has passed passes again; -m soak draws more and others.
    """
    is_controller = getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput")
    if not is_controller:  # which runs no test: it starts its workers seconds earlier
        _prepare_torch()
    settings.register_profile(
        "weft",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        derandomize="soak" not in config.option.markexpr,
        max_examples=200 if "soak" in config.option.markexpr else 30,
        print_blob=True,
    )
    settings.load_profile("weft")
    config.addinivalue_line("markers", "soak: the full product of plans and models, minutes long; run with -m soak")
    config.addinivalue_line("markers", "sampled(count): one in `count` of its cases runs, the others with -m soak")
    config.addinivalue_line("markers", "processes: starts processes; `make check` leaves it out")
    config.addinivalue_line("markers", "full: `make check` leaves it out; with a count, all but one in `count` cases")


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    """What a test draws without a seed of its own does not depend on the tests before it."""
    import torch

    torch.default_generator.manual_seed(0)  # `torch.manual_seed` prints a stack for each kind of device, for later


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Any:
    """The command line in this process, as a function."""
    from commands_for_tests import caller

    return caller(monkeypatch, capfd)


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file of a small run, in the current folder."""
    from runs_for_tests import write_run_file

    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path)


@pytest.fixture(autouse=True)
def _no_signal_stays_blocked() -> Iterator[None]:
    """A test that leaves a signal blocked would fail those after it: their processes inherit that."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield
    after = signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert after == before, "it left signals blocked"


@pytest.fixture(autouse=True)
def _no_process_without_the_marker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Under `make check`, a test that starts a process and is not marked fails."""
    if "not processes" not in request.config.option.markexpr:
        yield
        return
    platform.processor()  # python asks `uname` once, which clients of a server would do inside a test
    started: list[str] = []
    own, fork, popen, spawn = os.getpid(), os.fork, subprocess.Popen.__init__, os.posix_spawn

    def note(how: str) -> None:
        if os.getpid() == own:
            started.append(how)

    def noted_popen(self: Any, *args: Any, **kwargs: Any) -> None:
        note("subprocess")
        popen(self, *args, **kwargs)

    monkeypatch.setattr(os, "fork", lambda: (note("fork"), fork())[1])
    monkeypatch.setattr(subprocess.Popen, "__init__", noted_popen)
    monkeypatch.setattr(os, "posix_spawn", lambda *a, **k: (note("posix_spawn"), spawn(*a, **k))[1])
    yield
    if started:
        pytest.fail(f"it started a process ({started[0]}); mark it with pytest.mark.processes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Under `make check`, a file whose every test starts processes is not read: half of the files are such. Nor are
    tests for GPUs, which `make test-gpu` runs.
    """
    if config.option.markexpr != "not processes":
        return None
    if collection_path.name == "gpu":
        return True
    if collection_path.suffix != ".py":
        return None
    is_left_out = "\npytestmark = pytest.mark.processes\n" in collection_path.read_text(encoding="utf-8")
    return is_left_out or None  # None: other plug-ins decide


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    _mark_sampled(items)
    if "soak" in config.option.markexpr:
        for item in items:
            if getattr(getattr(item, "obj", None), "is_hypothesis_test", False):
                item.add_marker("soak")  # with more examples, and others
        return
    _leave_out(config, items, [item for item in items if item.get_closest_marker("soak")])
    if config.option.markexpr == "not processes":
        _leave_out(config, items, _only_in_full(items))


def _leave_out(config: pytest.Config, items: list[pytest.Item], deselected: list[pytest.Item]) -> None:
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        left_out = set(map(id, deselected))
        items[:] = [item for item in items if id(item) not in left_out]


def _only_in_full(items: list[pytest.Item]) -> list[pytest.Item]:
    """Returns what has the marker `full`; of a test with full(count), all cases but one in `count`."""
    found, numbers = [], defaultdict[str, int](int)
    for item in items:
        marker = item.get_closest_marker("full")
        if marker is None:
            continue
        test = item.nodeid.partition("[")[0]
        if not marker.args or numbers[test] % marker.args[0]:
            found.append(item)
        numbers[test] += 1
    return found


def pytest_collection_finish(session: pytest.Session) -> None:
    """Take all that exists before the first test (modules, cases) out of garbage collection, which then takes little.

    A full collection goes through a million objects otherwise, for a third of a second and more.
    """
    gc.collect()
    gc.freeze()
    if session.config.option.markexpr == "not processes":  # a tenth as many full collections; ranks measure memory
        gc.set_threshold(2000, 20, 50)
    atexit.register(gc.unfreeze)  # or extensions report at exit what they could not free


# Cases that cost most on two slow cores, by their ids; others test the same features always.
COSTLY = frozenset((Path(__file__).parent / "helpers" / "costly_cases.txt").read_text(encoding="utf-8").splitlines())


def _mark_sampled(items: list[pytest.Item]) -> None:
    """Mark as soak all but one in `count` of the cases of each test with the marker sampled(count), and costly cases.

    Of the cases of a test that starts processes, one in six runs; if it says itself which are soak, or if it has two,
    every second of the others. If all of these are costly, the first that is not runs.
    """
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for own in cases.values():
        left = [item for item in own if not item.get_closest_marker("soak")]
        if not left:
            continue
        marker, count = left[0].get_closest_marker("sampled"), 1
        if marker:
            count = marker.args[0]
        elif left[0].get_closest_marker("processes"):
            count = 2 if len(left) < len(own) or len(own) == 2 else 6
        cheap = [item for item in left if item.nodeid not in COSTLY]
        chosen = [item for item in left[::count] if item.nodeid not in COSTLY] or cheap[:1]
        for item in left:
            if item not in chosen:
                item.add_marker("soak")
