"""Detects hangs without weft's agent: under torchrun, srun or mpirun, a thread of each rank watches for them.

The thread reads the rank's own status page (health/rank_status.py) and asks the world's store whether any rank has
raised an alarm. A rank raises the alarm when it has waited, or written no page, for longer than its deadline. Then
every rank that still runs dumps its stacks and reports the pages of all ranks of its host, so that a stopped rank is
reported by its neighbours. The lowest rank that reported decides whether it is a hang and prints one paragraph. All
ranks then exit with a status that a launcher treats as a failure. Without an alarm, this costs one query to the store
per poll, from a thread.

A rank that cannot reach the store (a broken link) decides by the pages of its own host.
"""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]  # as documented

from weft.errors import CheckpointError, LaunchError
from weft.health.rank_status import FILE_PHASES, Status, StatusPage, page_path, read_page
from weft.health.watchdog import Deadline, describe_hang, overdue_seconds
from weft.launch.environment import RankInfo
from weft.resilience.shared_memory import claim, job_folder

HUNG = 124  # the exit status of a hang, as timeout(1) uses it
_ANSWER_SECONDS = 5.0  # how long to wait for the reports of all ranks
_STORE_SECONDS = 3.0  # how long to wait for the store
_POLL_SECONDS = 0.5
_HEAR_SECONDS = 0.05
_RANKS_A_SECOND = 2000  # queries per second that the store, a single process, can answer

T = TypeVar("T")


class Lookout:
    """Watches for hangs while a rank trains. On exit it waits for a pending decision, because an error of this rank may
    be due to ranks that hang.
    """

    def __init__(self, status: Status, rank_info: RankInfo, store: Store, deadline: Deadline, folder: Path) -> None:
        self._status, self._rank_info, self._deadline, self._folder = status, rank_info, deadline, folder
        self._client = _StoreClient(store)
        self._host_folder, self._claim = _open_host_folder(store, rank_info)
        if self._host_folder is not None:
            with suppress(LaunchError):  # no memory for the file: other ranks cannot see this rank's page
                status.publish_in(self._host_folder)
        store.set(f"place/{rank_info.rank}", status.place)
        self._store_place = store.get("place/0").decode() if rank_info.rank else status.place
        self._alarm, self._quiet_until = 0, 0.0
        self._overdue: StatusPage | None = None  # the page at the last poll, if it was overdue
        self._closed, self._is_settled = threading.Event(), threading.Event()
        self._is_settled.set()
        self._thread = threading.Thread(target=self._watch, name="lookout", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lookout:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_settled.wait(4 * _ANSWER_SECONDS)
        self._closed.set()
        self._thread.join(2 * _STORE_SECONDS)
        if self._host_folder is not None:
            with suppress(OSError):
                page_path(self._host_folder, self._rank_info.rank).unlink(missing_ok=True)
                if not list(self._host_folder.glob("rank-*")):
                    shutil.rmtree(self._host_folder)

    def _watch(self) -> None:
        poll_seconds = max(_POLL_SECONDS, self._rank_info.num_ranks / _RANKS_A_SECOND)
        while not self._closed.wait(poll_seconds):
            page = self._status.page()
            if page is None:
                continue  # still starting: the operations it waits for then have their own timeouts
            self._deadline.measure(page)
            is_due = self._is_overdue(page)
            if (is_due and self._overdue == page) or self._client.has(f"call/{self._alarm}"):
                self._handle_alarm()
            self._overdue = page if is_due else None  # all may have been stopped for a while, so check twice

    def _is_overdue(self, page: StatusPage) -> bool:
        return time.monotonic() > self._quiet_until and overdue_seconds([page]) > self._deadline.seconds

    # --- after an alarm

    def _handle_alarm(self) -> None:
        """Raise or answer the alarm: report the pages of this host, wait for the decision, and exit if it is a hang."""
        self._is_settled.clear()
        stamp = self._client.set_once(f"call/{self._alarm}", time.strftime("%Y%m%d-%H%M%S"))
        stacks = self._dump_stacks(stamp or time.strftime("%Y%m%d-%H%M%S"))
        pages_here = _host_pages(self._host_folder, self._status)
        is_overdue = self._is_overdue(pages_here[self._rank_info.rank])
        report = _encode(pages_here, is_overdue)
        if stamp is not None and self._client.set(f"said/{self._alarm}/{self._rank_info.rank}", report):
            is_hang = self._await_verdict(stacks)
        else:
            is_hang = is_overdue and self._decide_locally(pages_here, stacks)
        if is_hang:
            os._exit(HUNG)
        self._alarm, self._quiet_until = self._alarm + 1, time.monotonic() + self._deadline.seconds
        self._is_settled.set()

    def _await_verdict(self, stacks: Path) -> bool:
        """Wait until the lowest rank that reported, possibly this one, has decided. Returns whether it is a hang."""
        report, verdict = f"said/{self._alarm}", f"verdict/{self._alarm}"
        deadline = time.monotonic() + _ANSWER_SECONDS
        others = [f"{report}/{rank}" for rank in range(self._rank_info.num_ranks)]
        while time.monotonic() < deadline and not self._client.has(verdict):
            if self._rank_info.rank == 0 and self._client.has(*others):
                break
            time.sleep(_HEAR_SECONDS)
        if not self._client.has(verdict) and not any(self._client.has(one) for one in others[: self._rank_info.rank]):
            found = self._decide(stacks)
            if self._client.set(verdict, "hang" if found else "") and found:
                time.sleep(1.0)  # leave others time to read the verdict: the store may be in this process
            return found
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._client.has(verdict):
            time.sleep(_HEAR_SECONDS)
        return self._client.get(verdict) != ""  # no verdict at all: the rank that was to decide is gone as well

    def _decide(self, stacks: Path) -> bool:
        """Combine the reports of all ranks. If it is a hang, print a description and return True."""
        known: dict[int, StatusPage] = {}
        is_overdue = False
        for rank, text in self._client.get_all(f"said/{self._alarm}", range(self._rank_info.num_ranks)).items():
            pages, finds_it_overdue = _decode(text)
            is_overdue = is_overdue or finds_it_overdue
            for number, page in pages.items():
                if number == rank or number not in known:  # prefer a rank's own report of its page
                    known[number] = page
        if not is_overdue or any(page.doing in FILE_PHASES for page in known.values()):
            return False
        silent = [rank for rank in range(self._rank_info.num_ranks) if rank not in known]
        places = self._client.get_all("place", silent)
        self._print_report(describe_hang(known, places, overdue_seconds(known.values())), stacks)
        return True

    def _decide_locally(self, pages_here: Mapping[int, StatusPage], stacks: Path) -> bool:
        """Decide by the pages of this host. Of its ranks that cannot reach the store, the lowest prints the
        description. Returns whether it is a hang.
        """
        if any(page.doing in FILE_PHASES for page in pages_here.values()):
            return False
        if self._host_folder is not None:
            own = self._host_folder / f"called-{self._rank_info.rank:05d}"
            with suppress(FileNotFoundError):  # another rank has printed the description and removed the folder
                own.touch()
                time.sleep(_ANSWER_SECONDS)
            if own != min(self._host_folder.glob("called-*"), default=None):
                return True
        whose = f"rank 0 ({self._store_place})" if self._store_place else "rank 0"
        here = pages_here[self._rank_info.rank].place
        self._print_report(
            f"{here + ': ' if here else ''}the store of {whose} does not answer, so that host or the link to it may be "
            f"down; what is known here: {describe_hang(pages_here, {}, overdue_seconds(pages_here.values()))}",
            stacks,
        )
        return True

    def _print_report(self, words: str, stacks: Path) -> None:
        text = f"weft: {words}; stacks are in {stacks}. All ranks end with status {HUNG}, for the launcher to restart."
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            (stacks / f"what-{self._rank_info.rank:05d}.txt").write_text(text + "\n")
        if self._host_folder is not None:  # no other rank needs it after this
            shutil.rmtree(self._host_folder, ignore_errors=True)

    def _dump_stacks(self, stamp: str) -> Path:
        """Write the stacks of all threads of this rank to a folder that all ranks share, and return the folder."""
        folder = self._folder / f"hang-{stamp}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"rank-{self._rank_info.rank:05d}.txt", "w") as file:
                page = self._status.page()
                file.write(f"rank {self._rank_info.rank}: {page}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        return folder


def _open_host_folder(store: Store, rank_info: RankInfo) -> tuple[Path | None, Any]:
    """Open a folder for the pages of this host's ranks. Returns the folder and the lock that keeps it; (None, None)
    without shared memory.
    """
    if rank_info.rank == 0:
        store.set("lookout", os.urandom(8).hex())
    try:
        folder = job_folder(f"lookout {store.get('lookout').decode()}")
        return folder, claim(folder)
    except (CheckpointError, OSError):
        return None, None


def _host_pages(folder: Path | None, status: Status) -> dict[int, StatusPage]:
    """The status pages of the ranks of this host. This rank must have begun a step."""
    found: dict[int, StatusPage] = {}
    for path in folder.glob("rank-*.page") if folder is not None else []:
        rank = int(path.stem.partition("-")[2])
        page = read_page(path.parent, rank)
        if page is not None:
            found[rank] = page
    own = status.page()
    assert own is not None
    return {**found, status.rank: own}


def _encode(pages_here: Mapping[int, StatusPage], is_overdue: bool) -> str:
    """Encode pages as JSON, with ages instead of times, because the clocks of hosts differ."""
    now = time.monotonic()
    pages = {rank: {**asdict(page), "at": now - page.at} for rank, page in pages_here.items()}
    return json.dumps({"pages": pages, "is_overdue": is_overdue})


def _decode(text: str) -> tuple[dict[int, StatusPage], bool]:
    """Decode a rank's report: the pages of its host, and whether its own wait is overdue."""
    now, report = time.monotonic(), json.loads(text)
    pages = {
        int(rank): StatusPage(**{**page, "at": now - page["at"], "peers": tuple(page["peers"])})
        for rank, page in report["pages"].items()
    }
    return pages, report["is_overdue"]


class _StoreClient:
    """Queries the store in a separate thread, because it may not answer for many minutes if a link is broken."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking: threading.Thread | None = None

    def has(self, *keys: str) -> bool:
        """Whether all keys are set; False if the store does not answer."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> str | None:
        """The value of a key; None if it is not set or the store does not answer."""
        return self._ask(lambda: self._store.get(key).decode()) if self.has(key) else None

    def get_all(self, prefix: str, ranks: Iterable[int]) -> dict[int, str]:
        """The values of the keys `prefix/rank` that are set, by rank."""

        def read() -> dict[int, str]:
            keys = {rank: f"{prefix}/{rank}" for rank in ranks}
            return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

        return self._ask(read) or {}

    def set(self, key: str, value: str) -> bool:
        """Set a key. Returns False if the store does not answer."""

        def write() -> bool:
            self._store.set(key, value)
            return True

        return bool(self._ask(write))

    def set_once(self, key: str, value: str) -> str | None:
        """Set a key if it is not set. Returns the value of the rank that set it; None if the store does not answer."""
        return self._ask(lambda: self._store.compare_set(key, "", value).decode())

    def _ask(self, question: Callable[[], T]) -> T | None:
        if self._asking is not None and self._asking.is_alive():
            return None
        answers: list[T] = []

        def ask() -> None:
            with suppress(RuntimeError):  # the store is gone
                answers.append(question())

        self._asking = threading.Thread(target=ask, daemon=True)
        self._asking.start()
        self._asking.join(_STORE_SECONDS)
        return answers[0] if answers else None
