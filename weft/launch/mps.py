"""NVIDIA's Multi-Process Service (MPS) for ranks that share a GPU, owned by the run that starts it.

With MPS, kernels of several processes run on a GPU at the same time. Without it, the GPU gives each process its time in
turn. The service is a daemon with folders of its own, so it does not meet another user's, and a shell that waits for
the end of this process stops it: also if this process is killed.
"""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from weft.cluster.local_gpus import VISIBLE_VARIABLE

CONTROL = "nvidia-cuda-mps-control"
PIPE_VARIABLE, LOG_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
START_SECONDS, STOP_SECONDS = 10.0, 20.0
# $1 is the control program, $2 the folder. `read` returns when the pipe of this process closes.
_GUARD = """
"$1" -f </dev/null >"$2/control.out" 2>&1 &
daemon=$!
read -r end
echo quit -t 5 | timeout 10 "$1" >/dev/null 2>&1
for i in 1 2 3 4 5 6 7 8 9 10; do kill -0 $daemon 2>/dev/null || break; sleep 0.3; done
kill -9 $daemon 2>/dev/null
rm -rf "$2"
"""


@contextmanager
def shared_gpu_service(environ: Mapping[str, str], say: Callable[[str], None]) -> Iterator[dict[str, str]]:
    """A context in which MPS runs. Yields the variables that ranks need to use it; none if they take turns.

    A service that the user has started and named in `environ` is used as it is.
    """
    if PIPE_VARIABLE in environ:
        yield {}
        return
    control = shutil.which(CONTROL, path=environ.get("PATH"))
    if control is None:
        say(f"{CONTROL} is not installed: ranks that share a GPU take turns on it, and hardly use it better than one")
        yield {}
        return
    environ = {name: value for name, value in environ.items() if name != VISIBLE_VARIABLE}  # ranks choose their GPUs
    folder = Path(tempfile.mkdtemp(prefix="weft-mps-"))
    own = {PIPE_VARIABLE: str(folder), LOG_VARIABLE: str(folder)}
    with subprocess.Popen(
        ["/bin/sh", "-c", _GUARD, "weft-mps", control, str(folder)],
        stdin=subprocess.PIPE,
        env={**environ, **own},
        start_new_session=True,  # Ctrl-C is for the run, which then stops the service
    ) as guard:
        try:
            problem = _start_problem(control, {**environ, **own}, folder)
            if problem is not None:
                say(f"MPS did not start ({problem}): ranks that share a GPU take turns on it")
            yield own if problem is None else {}
        finally:
            assert guard.stdin is not None
            guard.stdin.close()
            try:
                guard.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                guard.kill()
                say(f"MPS did not stop within {STOP_SECONDS:.0f} s; its folder is {folder}, its program {CONTROL}")


def _start_problem(control: str, environ: Mapping[str, str], folder: Path) -> str | None:
    """Wait until the service answers. Returns why it does not, or None."""
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        given: dict[str, Any] = {"input": "get_server_list\n", "capture_output": True, "text": True}
        asked = subprocess.run([control], env=dict(environ), timeout=START_SECONDS, **given)
        if asked.returncode == 0 and "Cannot find" not in asked.stdout + asked.stderr:
            return None
        time.sleep(0.1)
    log = folder / "control.out"
    words = log.read_text(errors="replace").strip().splitlines() if log.exists() else []
    return words[-1][:200] if words else f"no answer within {START_SECONDS:.0f} s"
