"""The service for shared GPUs: started with folders of its own, stopped with the run, also if the run is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from waiting_for_tests import wait_until

from weft.launch.mps import CONTROL, PIPE_VARIABLE, shared_gpu_service

pytestmark = pytest.mark.processes

# A control program that does what NVIDIA's does: `-f` serves until it is told to quit, through its folder.
FAKE = """#!/bin/sh
if [ "$1" = -f ]; then
    echo $$ > "$STATE/daemon"
    echo "$CUDA_VISIBLE_DEVICES" > "$STATE/visible"
    {failure}
    touch "$CUDA_MPS_PIPE_DIRECTORY/control"
    while [ ! -e "$CUDA_MPS_PIPE_DIRECTORY/quit" ]; do sleep 0.05; done
    exit 0
fi
[ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ] || {{ echo "Cannot find MPS control daemon process"; exit 1; }}
read -r words
case "$words" in quit*) {quit};; esac
"""
QUIT = 'touch "$CUDA_MPS_PIPE_DIRECTORY/quit"'


def install(folder: Path, failure: str = "", quit_words: str = QUIT) -> dict[str, str]:
    """The environment of a machine with such a control program."""
    program = folder / "bin" / CONTROL
    program.parent.mkdir()
    program.write_text(FAKE.format(failure=failure, quit=quit_words))
    program.chmod(0o755)
    path = os.pathsep.join([str(program.parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "STATE": str(folder), "CUDA_VISIBLE_DEVICES": ""}


def is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def daemon(folder: Path) -> int:
    return int((folder / "daemon").read_text())


def test_the_service_lives_as_long_as_the_context(tmp_path: Path) -> None:
    said: list[str] = []
    with shared_gpu_service(install(tmp_path), said.append) as variables:
        folder = Path(variables[PIPE_VARIABLE])
        assert folder.is_dir()
        assert is_alive(daemon(tmp_path))
        assert (tmp_path / "visible").read_text() == "\n"  # not that of a command, which hides GPUs from itself
    assert not is_alive(daemon(tmp_path))
    assert not folder.exists()
    assert not said


def test_a_service_that_does_not_quit_is_killed(tmp_path: Path) -> None:
    with shared_gpu_service(install(tmp_path, quit_words=":"), pytest.fail) as variables:
        pass
    assert not is_alive(daemon(tmp_path))
    assert not Path(variables[PIPE_VARIABLE]).exists()


def test_the_service_ends_with_a_killed_run(tmp_path: Path) -> None:
    program = (
        "import os, sys, time\n"
        "from weft.launch.mps import shared_gpu_service\n"
        "with shared_gpu_service(os.environ, print):\n"
        "    print('up', flush=True)\n"
        "    time.sleep(600)\n"
    )
    environ = install(tmp_path)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    with subprocess.Popen([sys.executable, "-c", program], env=environ, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdout is not None
        assert own.stdout.readline() == "up\n"
        service = daemon(tmp_path)
        own.send_signal(signal.SIGKILL)
    wait_until(lambda: not is_alive(service), "the end of the service")


def test_a_service_that_fails_is_told_and_ranks_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.launch.mps.START_SECONDS", 1.0)
    said: list[str] = []
    with shared_gpu_service(install(tmp_path, failure="echo no permission; exit 1"), said.append) as variables:
        assert variables == {}
    assert said == ["MPS did not start (no permission): ranks that share a GPU take turns on it"]


def test_without_the_program_ranks_take_turns(tmp_path: Path) -> None:
    said: list[str] = []
    with shared_gpu_service({"PATH": str(tmp_path)}, said.append) as variables:
        assert variables == {}
    assert len(said) == 1
    assert f"{CONTROL} is not installed" in said[0]
    assert "take turns" in said[0]


def test_the_users_own_service_is_used(tmp_path: Path) -> None:
    with shared_gpu_service({**install(tmp_path), PIPE_VARIABLE: "/run/mps"}, pytest.fail) as variables:
        assert variables == {}
    assert not (tmp_path / "daemon").exists()
