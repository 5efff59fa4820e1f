"""Ranks of a server that fail, stop or hang: all are started again, and clients are answered throughout."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from serve_for_tests import wait_for
from served_ranks_for_tests import ServedRanks, save_step, served_ranks

pytestmark = pytest.mark.processes

FAIL_ONCE = """
import os
from weft.errors import NumbersError
from weft.serve.engine import Engine
from weft.serve.model.model_part import ModelPart

def failing(owner, method, rank, error):
    real = getattr(owner, method)
    def call(*arguments, **named):
        if os.path.exists({flag!r}) and os.environ.get("RANK") == rank:
            os.unlink({flag!r})
            raise error
        return real(*arguments, **named)
    setattr(owner, method, call)

"""


def wait_for_restart(served: ServedRanks, before: list[int]) -> None:
    wait_for(lambda: not set(before) & set(served.ranks()) and served.health()[0] == 200)


@pytest.mark.parametrize(
    ("plan", "failing"),
    [
        ("plan.tensor.x=2", 'failing(Engine, "step", "0", RuntimeError("made to fail"))'),
        pytest.param(
            "plan.pipe=2", 'failing(ModelPart, "logits", "1", NumbersError("made to fail"))', marks=pytest.mark.soak
        ),
        ("plan.data=2", 'failing(Engine, "step", "1", NumbersError("made to fail"))'),
    ],
)
def test_when_an_engine_fails_all_ranks_start_again(plan: str, failing: str, tmp_path: Path) -> None:
    run, flag = tmp_path / "run", tmp_path / "fail"
    save_step(run, 1)
    program = FAIL_ONCE.format(flag=str(flag)) + failing + "\n"
    with served_ranks(run, plan, program=program) as served:
        right, before = served.text(), served.ranks()
        flag.touch()
        while flag.exists():  # with replicas, the first request may go to the other one
            served.ask_if_it_answers()
        wait_for_restart(served, before)
        assert "made to fail. All ranks start again (restart 1 of at most 5" in served.said
        assert served.text() == right
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0
