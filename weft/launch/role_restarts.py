"""Restarts single ranks of other roles than training: the training ranks go on meanwhile.

A killed rank that does not train is started again alone and joins the training ranks where they are. One that fails
with an error would fail again, so the training ranks go on without it. Before all training ranks have begun a step the
job cannot go on without any rank, and all ranks start again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from pathlib import Path

from weft.health.lost_ranks import describe_failures
from weft.health.rank_status import forget_failure, read_failures, read_page


class RoleRestarts:
    """Handles the exits of ranks from `num_training` on. `start` starts one of them again and returns its process id;
    at most `limit` times within `window_seconds`.
    """

    def __init__(
        self,
        folder: Path,
        num_training: int,
        start: Callable[[int], int],
        limit: int,
        window_seconds: float,
        end_seconds: float,
    ) -> None:
        """`end_seconds`: how long these ranks may take to end after the training ranks have."""
        self._end_seconds, self._ended_at = end_seconds, math.inf
        self._folder, self._num_training, self._start = folder, num_training, start
        self._limit, self._window_seconds = limit, window_seconds
        self._restarted_at: list[float] = []
        self.num_lost = 0  # the number of ranks that ended and were not started again

    def are_overdue(self, codes: dict[int, int]) -> bool:
        """Have all training ranks ended, and other ranks not, for too long?"""
        if self._ended_at == math.inf and all(rank in codes for rank in range(self._num_training)):
            self._ended_at = time.monotonic()
        return time.monotonic() > self._ended_at + self._end_seconds

    def accept_losses(self, codes: dict[int, int], pids: list[int], is_stopping: bool) -> list[str]:
        """Removes ranks that failed from `codes`, and starts those again that were killed. Returns what to say."""
        failed = {rank: code for rank, code in codes.items() if code and rank >= self._num_training}
        if not failed or any(code for rank, code in codes.items() if code and rank < self._num_training):
            return []  # a training rank explains the others
        if any(read_page(self._folder, rank) is None for rank in range(self._num_training)):
            return []
        messages = []
        for rank, code in failed.items():
            del codes[rank]
            now, what = time.monotonic(), describe_failures({rank: code})[0]
            recent = [at for at in self._restarted_at if at > now - self._window_seconds]
            if code < 0 and not is_stopping and len(recent) < self._limit:
                self._restarted_at.append(now)
                pids[rank] = self._start(rank)
                messages.append(f"weft: {what}. It does not train, so it starts again alone; no step is lost")
                continue
            self.num_lost += 1
            failure = read_failures(self._folder, rank + 1).get(rank)
            why = "" if failure is None else f": {failure.message}"
            forget_failure(self._folder, rank)  # a later failure has another cause
            messages.append(f"weft: {what}{why}. It does not train, so training goes on without it")
        return messages
