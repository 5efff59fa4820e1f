"""Connects training ranks with ranks of other roles, also with one that was lost and started again.

A rank of another role announces each of its starts in the job's store, and then waits for every training rank, as long
as training lasts: a training rank connects at the beginning, and again when it finds a newer start, which may be hours
later. Nobody waits for a rank that was lost.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.comm.channel import PairChannel
from weft.comm.ledger import Ledger
from weft.errors import LaunchError, LostRankError

# How long a training rank waits for a rank that has started again: other training ranks may wait for it meanwhile.
RETURN_TIMEOUT = timedelta(seconds=30)
_END_KEY = "role/end"
_POLL_SECONDS = 0.25


class TrainingEndedError(LostRankError):
    """Training has ended, so a rank of another role has nothing more to do."""


def digest(settings: Mapping[str, str]) -> str:
    """Returns a hash of what one rank has read of a run and its data. It must be the same on all ranks of the run."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


class RoleLink:
    """A training rank's link to one rank of another role. `channel` is None while that rank is lost."""

    def __init__(self, store: Store, role: str, number: int, trainer: int, ledger: Ledger, timeout: timedelta) -> None:
        self.role, self.number, self.name = role, number, f"{role} {number}"
        self.channel: PairChannel | None = None
        self.start = 0  # the start of the other rank that `channel` is connected to; 0: none yet
        self._store, self._trainer, self._ledger, self._timeout = store, trainer, ledger, timeout

    def connect(self, own_digest: str, start: int = 1) -> PairChannel:
        """Connects to a start of the other rank. Raises LostRankError if it is gone, and LaunchError if it has read
        another run or other data.
        """
        key = _start_key(self.role, self.number, start)
        self.start = start
        try:
            self._store.wait([key], self._timeout)
            theirs = self._store.get(key).decode()
        except RuntimeError as error:  # also torch's DistError
            reason = str(error).partition("\n")[0]
            limit = f"{self._timeout.total_seconds():.0f} s"
            raise LostRankError(
                f"{self.name} did not come within {limit}, or the job's store is lost ({reason})"
            ) from error
        if theirs != own_digest:
            raise LaunchError(
                f"{self.name} has read another run file or other data than training rank {self._trainer}; start all "
                f"ranks with the same run file, code and data"
            )
        self._store.set(_coming_key(key, self._trainer), "1")
        timeout = self._timeout if start == 1 else min(self._timeout / 3, RETURN_TIMEOUT)
        self.channel = PairChannel(
            self._store, f"{key}/{self._trainer}", 0, self.role, self.name, self._ledger, timeout
        )
        return self.channel

    def newer_start(self) -> int | None:
        """The number of a start of the other rank after the one that was connected to; None if there is none."""
        found = None
        while self._store.check([_start_key(self.role, self.number, (found or self.start) + 1)]):
            found = (found or self.start) + 1
        return found

    def lose(self) -> None:
        """Drop the channel, whose other end is gone."""
        self.channel = None


def find_returned(links: Iterable[RoleLink], own_digest: str, say: Callable[[str], None]) -> None:
    """Connect to ranks of another role that were lost and have started again."""
    for link in links:
        start = link.newer_start() if link.channel is None else None
        if start is not None:
            try:
                link.connect(own_digest, start)
                say(f"{link.name} is back")
            except LostRankError as error:
                link.lose()
                say(f"{error}; training goes on without it")


def announce(
    store: Store, role: str, number: int, own_digest: str, ledger: Ledger, timeout: timedelta
) -> Callable[[int], PairChannel]:
    """Announces this start of a rank. Returns a function that waits for a training rank, and connects to it. It raises
    TrainingEndedError if training ends before.

    Call it for each training rank in a thread of its own. They come in any order, and one may come only after another
    has got what it asked for: it may be in a collective that waits for that other.
    """
    start = store.add(f"role/{role}/{number}/starts", 1)
    key = _start_key(role, number, start)
    store.set(key, own_digest)

    def connect(trainer: int) -> PairChannel:
        own = store.clone()  # type: ignore[attr-defined]  # waits of one connection do not hold up the others
        _wait_for_trainer(own, _coming_key(key, trainer))
        return PairChannel(own, f"{key}/{trainer}", 1, role, f"training rank {trainer}", ledger, timeout)

    return connect


def meet_trainers(
    store: Store, role: str, number: int, num_training: int, own_digest: str, ledger: Ledger, timeout: timedelta
) -> list[PairChannel]:
    """Announces this start of a rank and connects to every training rank. Returns the channels in order of rank. Raises
    TrainingEndedError if training ends before.
    """
    connect = announce(store, role, number, own_digest, ledger, timeout)
    with ThreadPoolExecutor(num_training) as threads:
        return list(threads.map(connect, range(num_training)))


def end_roles(store: Store) -> None:
    """Tells ranks of other roles that wait for a training rank that training has ended."""
    store.set(_END_KEY, "1")


def _wait_for_trainer(store: Store, coming: str) -> None:
    """Returns when a training rank has set the key `coming`. Raises TrainingEndedError if it will not."""
    try:
        while not store.check([coming]):
            if store.check([_END_KEY]):
                raise TrainingEndedError("training has ended")
            time.sleep(_POLL_SECONDS)
    except RuntimeError as error:  # also torch's DistError
        raise TrainingEndedError(f"the job's store is gone ({error})") from error


def _coming_key(start: str, trainer: int) -> str:
    """The key by which a training rank says that it connects to a start of a rank."""
    return f"{start}/{trainer}/comes"


def _start_key(role: str, number: int, start: int) -> str:
    return f"role/{role}/{number}/start/{start}"
