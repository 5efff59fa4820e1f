"""Runs a backward on fake tensors where it does no harm: in a forked process, if torch has accelerators.

torch's first backward starts threads for them, and no process can fork ranks after that.
"""

from __future__ import annotations

import json
import os
import select
import signal
from collections.abc import Callable
from typing import Any

import torch

FORKED_SECONDS = 120.0


def run_apart(function: Callable[[], Any]) -> Any:
    """What a function gives, as JSON has it. Where torch has started its threads already, a forked process would fail
    and nothing is left to keep from.
    """
    if torch.cuda.is_initialized() or (torch.version.cuda is None and torch.version.hip is None):
        return json.loads(json.dumps(function()))
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            os.write(write, json.dumps(function()).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        text = pipe.read() if select.select([pipe], [], [], FORKED_SECONDS)[0] else b""
    if not text:
        os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return json.loads(text) if text else json.loads(json.dumps(function()))
