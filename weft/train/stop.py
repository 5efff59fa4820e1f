"""SIGTERM and Ctrl-C: the ranks agree on a step to stop after, so that all save the same step and exit with status
0.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType

import torch
from torch import Tensor

from weft.comm import Pending, all_reduce
from weft.mesh import Mesh
from weft.pipeline.sections import Sections, raising_lost_rank

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Stop:
    """Turns a signal at any rank into one decision of all ranks.

    The flags (4 bytes over `world` a step) are reduced in host memory while the next step computes, and read after it,
    so no rank waits for them. All ranks read the same results in the same order, so all stop after the same step.
    """

    def __init__(
        self,
        mesh: Mesh,
        sections: Sections | None = None,
        wants_early: Callable[[], bool] = lambda: False,
        is_early: bool = False,
    ) -> None:
        """`sections` is given if ranks may be lost: the ranks then vote inside a section, and wait for the result.
        `wants_early` says on some rank whether the run should stop early, and `is_early` whether it had before.
        """
        self.agreed = self.is_early = is_early
        self._wants_early = wants_early
        self._mesh, self._sections = mesh, sections
        self._wanted = False
        self._asked: tuple[Tensor, Pending] | None = None
        self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}

    def ask(self) -> None:
        """Call after a step: reads the last vote's result, and starts a vote with this rank's flag."""
        self._read()
        if self._sections is not None:
            self._take(int(self._sections.run(self._vote)[0]))
            return
        flag = self._flag()
        self._asked = (flag, all_reduce(flag, self._mesh["world"], "max"))

    def _vote(self) -> list[float]:
        flag = self._flag()
        with raising_lost_rank("the vote on whether to stop"):
            all_reduce(flag, self._mesh["world"], "max").wait()
        return [float(flag.item())]

    def went_back(self) -> None:
        """The run has gone back: votes to stop early were of evaluations that do not count any more. A signal is voted
        on again.
        """
        self._read()
        if self.is_early:
            self.agreed = self.is_early = False

    def close(self) -> None:
        """Restores the signal handlers."""
        self._read()
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _read(self) -> None:
        if self._asked is not None:
            flag, pending = self._asked
            pending.wait()
            self._take(int(flag.item()))
            self._asked = None

    def _flag(self) -> Tensor:
        """This rank's vote: 0 to go on, 1 to stop and go on later, 2 to stop early."""
        return torch.tensor([2 if self._wants_early() else int(self._wanted)], dtype=torch.int32)

    def _take(self, flag: int) -> None:
        self.agreed, self.is_early = self.agreed or flag > 0, self.is_early or flag == 2

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self._wanted = True
