"""Ranks that were lost: how they are named, and the one whose loss the others make good (plan.pipe.shadow)."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path

from weft.health.rank_status import Lost, last_seen, read_taken_over, tell_lost
from weft.health.watchdog import Watchdog

_BEGIN_SECONDS, _BEGIN_POLL_SECONDS = 5.0, 0.02  # for all ranks to have begun their first step, when one is lost in it
_TAKE_OVER_SECONDS = 60.0  # for ranks that live to take the stage of one that does not


def describe_failures(exit_codes: Mapping[int, int]) -> tuple[str, int]:
    """What to say of ranks that left with these codes (-n: killed by signal n), and the exit status of the whole.

    Ranks that were asked to end with SIGTERM are named only when there is no better culprit. A rank killed by a signal
    comes first: the others' errors are mostly that they lost it.
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


class Losses:
    """The rank that the others do without, if there is one; never, unless they are `shadowed`."""

    def __init__(self, folder: Path, num_ranks: int, watchdog: Watchdog, shadowed: bool) -> None:
        self._folder, self._num_ranks, self._watchdog, self._shadowed = folder, num_ranks, watchdog, shadowed
        self._lost: Lost | None = None
        self.num_lost = 0  # that are no longer waited for
        self._code = 0
        self._is_told = False

    def absorb(self, codes: dict[int, int]) -> None:
        """Take a rank whose loss others can make good out of `codes`, and tell them."""
        failed = [rank for rank, code in codes.items() if code]
        if not self._shadowed or self._lost is not None or len(codes) != 1 or len(failed) != 1:
            return
        if failed[0] == 0 or codes[failed[0]] >= 0:  # nobody is before rank 0; an error would come again
            return
        deadline = time.monotonic() + _BEGIN_SECONDS
        while any(last_seen(self._folder, rank) is None for rank in range(self._num_ranks)):
            if time.monotonic() > deadline:
                return  # not all have begun to train
            time.sleep(_BEGIN_POLL_SECONDS)
        self._code = codes.pop(failed[0])
        self._lost, self.num_lost = Lost(failed[0], time.monotonic()), 1
        self._watchdog.lost = failed[0]
        tell_lost(self._folder, self._lost)

    def look(self, codes: dict[int, int]) -> str | None:
        """What to say, once it was made good; where that takes too long, it is put back into `codes`."""
        if self._lost is None or self._is_told:
            return None
        taken, waited = read_taken_over(self._folder), time.monotonic() - self._lost.at
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
            self.give_back(codes)
        return None

    def give_back(self, codes: dict[int, int]) -> None:
        """Put the rank back into `codes` if its loss was not made good: it explains what became of the others."""
        if self._lost is not None and not self._is_told and self.num_lost:
            codes[self._lost.rank], self.num_lost = self._code, 0
