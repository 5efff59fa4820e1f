"""Describes ranks that failed, and tracks a lost rank whose stage another rank takes over (plan.pipe.shadow)."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path

from weft.health.rank_status import LostRank, read_page, read_takeover, write_lost_rank
from weft.health.watchdog import Watchdog

_BEGIN_SECONDS, _BEGIN_POLL_SECONDS = 5.0, 0.02  # how long to wait, when a rank is lost, until all have begun a step
_TAKE_OVER_SECONDS = 60.0  # how long another rank may take to take over the stage of a lost rank


def describe_failures(exit_codes: Mapping[int, int]) -> tuple[str, int]:
    """Describe ranks that exited with these codes (-n: killed by signal n), and return the exit status of the job.

    Ranks that SIGTERM ended are named only if no other rank failed. A rank killed by another signal comes first: the
    errors of the others are mostly that they lost it.
    """
    culprits = {rank: code for rank, code in exit_codes.items() if code != -signal.SIGTERM} or exit_codes
    ranks_by_code: dict[int, list[int]] = {}
    for rank, code in sorted(culprits.items(), key=lambda item: (item[1] > 0, item[0])):
        ranks_by_code.setdefault(code, []).append(rank)
    phrases = []
    for code, ranks in ranks_by_code.items():
        who = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        if code > 0:
            phrases.append(f"{who} left with status {code}")
            continue
        was = "was" if len(ranks) == 1 else "were"
        hint = " (by hand, or by the kernel when memory ran out)" if code == -signal.SIGKILL else ""
        phrases.append(f"{who} {was} killed by {signal.Signals(-code).name}{hint}")
    first = next(iter(ranks_by_code))
    return "; ".join(phrases), first if first > 0 else 128 - first


class LostRankTracker:
    """Tracks the lost rank without which the others continue. There is at most one, and none unless `shadowed`."""

    def __init__(self, folder: Path, num_ranks: int, watchdog: Watchdog, shadowed: bool) -> None:
        self._folder, self._num_ranks, self._watchdog, self._shadowed = folder, num_ranks, watchdog, shadowed
        self._lost: LostRank | None = None
        self.num_lost = 0  # the number of ranks whose exit the agent no longer waits for: 0 or 1
        self._code = 0
        self._is_told = False

    def accept_loss(self, codes: dict[int, int]) -> None:
        """If another rank can take over the stage of the rank that was killed, remove it from `codes` and tell the
        other ranks.
        """
        failed = [rank for rank, code in codes.items() if code]
        if not self._shadowed or self._lost is not None or len(codes) != 1 or len(failed) != 1:
            return
        if failed[0] == 0 or codes[failed[0]] >= 0:  # no rank precedes rank 0; an error would happen again
            return
        deadline = time.monotonic() + _BEGIN_SECONDS
        while any(read_page(self._folder, rank) is None for rank in range(self._num_ranks)):
            if time.monotonic() > deadline:
                return  # not all ranks have begun to train
            time.sleep(_BEGIN_POLL_SECONDS)
        self._code = codes.pop(failed[0])
        self._lost, self.num_lost = LostRank(failed[0], time.monotonic()), 1
        self._watchdog.lost = failed[0]
        write_lost_rank(self._folder, self._lost)

    def poll(self, codes: dict[int, int]) -> str | None:
        """Returns a message once the lost rank's stage was taken over. If that takes too long, the rank is put back
        into `codes`.
        """
        if self._lost is None or self._is_told:
            return None
        taken, waited = read_takeover(self._folder), time.monotonic() - self._lost.at
        if taken is not None:
            self._is_told = True
            rest = "1 rank goes on" if self._num_ranks == 2 else f"{self._num_ranks - 1} ranks go on"
            everybody = "both" if self._num_ranks == 2 else f"all {self._num_ranks}"
            return (
                f"{describe_failures({self._lost.rank: self._code})[0]}, in step {taken.step}. Rank {taken.by} "
                f"took its pipe stage {taken.stage} over within {taken.seconds:.2f} s, in the same step; nothing is "
                f"lost. {rest} without shadows: another loss starts {everybody} again from the newest checkpoint."
            )
        if waited > max(_TAKE_OVER_SECONDS, self._watchdog.deadline.seconds):
            self.restore_exit_code(codes)
        return None

    def restore_exit_code(self, codes: dict[int, int]) -> None:
        """Put the lost rank back into `codes` if its stage was not taken over: its loss explains the others' errors."""
        if self._lost is not None and not self._is_told and self.num_lost:
            codes[self._lost.rank], self.num_lost = self._code, 0
