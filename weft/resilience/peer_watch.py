"""The watch over hangs where no agent of weft's is: under torchrun, srun or mpirun each rank looks out by itself.

A thread of each rank looks at the rank's own page (status.py), and asks the store at which the ranks met whether any
has called. A rank whose wait, or silence, has passed its deadline calls. Then every rank that lives dumps its stacks
and says what it and the others of its host were last seen doing; a rank that is stopped altogether is thus known by its
neighbours. The lowest that lives judges, and prints one paragraph; all leave with a status that a launcher takes as a
failure. While nothing is wrong this costs a question to the store now and then, from a thread.

A rank that does not reach the store (a cut link) judges by what its own host knows.
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
from weft.launch.environment import Place
from weft.resilience.shared_memory import claim, job_folder

HUNG = 124  # the exit status, as timeout(1) has it
_ANSWER_SECONDS = 5.0  # for all to answer a call
_STORE_SECONDS = 3.0  # for the store to answer
_POLL_SECONDS = 0.5
_HEAR_SECONDS = 0.05
_RANKS_A_SECOND = 2000  # that ask the store, which is one process

T = TypeVar("T")


class Lookout:
    """One rank's watch, around its training: an error of a rank that others have left waits for the verdict on them."""

    def __init__(self, status: Status, place: Place, store: Store, deadline: Deadline, folder: Path) -> None:
        self._status, self._place, self._deadline, self._folder = status, place, deadline, folder
        self._mail = _Mail(store)
        self._host_folder, self._claim = _open_host_folder(store, place)
        if self._host_folder is not None:
            with suppress(LaunchError):  # no room: this rank's page stays its own
                status.publish_in(self._host_folder)
        store.set(f"place/{place.rank}", status.place)
        self._store_place = store.get("place/0").decode() if place.rank else status.place
        self._call, self._quiet_until = 0, 0.0
        self._overdue: StatusPage | None = None  # the page at the last look, if it was that
        self._closed, self._is_settled = threading.Event(), threading.Event()
        self._is_settled.set()
        self._thread = threading.Thread(target=self._look_out, name="lookout", daemon=True)
        self._thread.start()

    def __enter__(self) -> Lookout:
        return self

    def __exit__(self, *_: object) -> None:
        self._is_settled.wait(4 * _ANSWER_SECONDS)
        self._closed.set()
        self._thread.join(2 * _STORE_SECONDS)
        if self._host_folder is not None:
            with suppress(OSError):
                page_path(self._host_folder, self._place.rank).unlink(missing_ok=True)
                if not list(self._host_folder.glob("rank-*")):
                    shutil.rmtree(self._host_folder)

    def _look_out(self) -> None:
        poll_seconds = max(_POLL_SECONDS, self._place.num_ranks / _RANKS_A_SECOND)
        while not self._closed.wait(poll_seconds):
            seen = self._status.page()
            if seen is None:
                continue  # setting up: what it waits for there has its own deadline
            self._deadline.measure(seen)
            is_due = self._is_overdue(seen)
            if (is_due and self._overdue == seen) or self._mail.has(f"call/{self._call}"):
                self._alarm()
            self._overdue = seen if is_due else None  # all may just have been stopped for a while: look twice

    def _is_overdue(self, seen: StatusPage) -> bool:
        return time.monotonic() > self._quiet_until and overdue_seconds([seen]) > self._deadline.seconds

    # --- after a call

    def _alarm(self) -> None:
        """Say what this rank knows, hear the verdict, and leave or go on."""
        self._is_settled.clear()
        stamp = self._mail.call(f"call/{self._call}", time.strftime("%Y%m%d-%H%M%S"))
        stacks = self._dump_stacks(stamp or time.strftime("%Y%m%d-%H%M%S"))
        known = _known(self._host_folder, self._status)
        is_overdue = self._is_overdue(known[self._place.rank])
        said = _encode(known, is_overdue)
        if stamp is not None and self._mail.set(f"said/{self._call}/{self._place.rank}", said):
            is_hang = self._hear(stacks)
        else:
            is_hang = is_overdue and self._judge_alone(known, stacks)
        if is_hang:
            os._exit(HUNG)
        self._call, self._quiet_until = self._call + 1, time.monotonic() + self._deadline.seconds
        self._is_settled.set()

    def _hear(self, stacks: Path) -> bool:
        """Whether it is a hang, as the lowest rank that lives finds; which may be this one."""
        said, verdict = f"said/{self._call}", f"verdict/{self._call}"
        deadline = time.monotonic() + _ANSWER_SECONDS
        others = [f"{said}/{rank}" for rank in range(self._place.num_ranks)]
        while time.monotonic() < deadline and not self._mail.has(verdict):
            if self._place.rank == 0 and self._mail.has(*others):
                break
            time.sleep(_HEAR_SECONDS)
        if not self._mail.has(verdict) and not any(self._mail.has(one) for one in others[: self._place.rank]):
            found = self._judge(stacks)
            if self._mail.set(verdict, "hang" if found else "") and found:
                time.sleep(1.0)  # for the others to hear of it: the store may be in this process
            return found
        deadline = time.monotonic() + _ANSWER_SECONDS
        while time.monotonic() < deadline and not self._mail.has(verdict):
            time.sleep(_HEAR_SECONDS)
        return self._mail.get(verdict) != ""  # none at all: whoever judged is gone as well

    def _judge(self, stacks: Path) -> bool:
        """Put together what all have said; say so and return True if it is a hang."""
        seen: dict[int, StatusPage] = {}
        is_overdue = False
        for rank, text in self._mail.get_all(f"said/{self._call}", range(self._place.num_ranks)).items():
            pages, finds_it_overdue = _decode(text)
            is_overdue = is_overdue or finds_it_overdue
            for number, page in pages.items():
                if number == rank or number not in seen:  # a rank knows itself best
                    seen[number] = page
        if not is_overdue or any(page.doing in FILE_PHASES for page in seen.values()):
            return False
        silent = [rank for rank in range(self._place.num_ranks) if rank not in seen]
        places = self._mail.get_all("place", silent)
        self._say(describe_hang(seen, places, overdue_seconds(seen.values())), stacks)
        return True

    def _judge_alone(self, known: Mapping[int, StatusPage], stacks: Path) -> bool:
        """By what this host knows. The lowest rank of it speaks for those that call as well."""
        if any(page.doing in FILE_PHASES for page in known.values()):
            return False
        if self._host_folder is not None:
            own = self._host_folder / f"called-{self._place.rank:05d}"
            with suppress(FileNotFoundError):  # another has spoken, and removed the folder
                own.touch()
                time.sleep(_ANSWER_SECONDS)
            if own != min(self._host_folder.glob("called-*"), default=None):
                return True
        whose = f"rank 0 ({self._store_place})" if self._store_place else "rank 0"
        here = known[self._place.rank].place
        self._say(
            f"{here + ': ' if here else ''}the store of {whose} does not answer, so that host or the link to it may be "
            f"down; what is known here: {describe_hang(known, {}, overdue_seconds(known.values()))}",
            stacks,
        )
        return True

    def _say(self, words: str, stacks: Path) -> None:
        text = f"weft: {words}; stacks are in {stacks}. All ranks end with status {HUNG}, for the launcher to restart."
        print(text, file=sys.stderr, flush=True)
        with suppress(OSError):
            (stacks / f"what-{self._place.rank:05d}.txt").write_text(text + "\n")
        if self._host_folder is not None:  # whoever speaks is the last to need it
            shutil.rmtree(self._host_folder, ignore_errors=True)

    def _dump_stacks(self, stamp: str) -> Path:
        """Where all threads of this rank are, in a folder that all ranks share."""
        folder = self._folder / f"hang-{stamp}"
        with suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with open(folder / f"rank-{self._place.rank:05d}.txt", "w") as file:
                seen = self._status.page()
                file.write(f"rank {self._place.rank}: {seen}\n")
                file.flush()
                faulthandler.dump_traceback(file)
        return folder


def _open_host_folder(store: Store, place: Place) -> tuple[Path | None, Any]:
    """A folder of this host's for the pages of its ranks, and what holds it; none where there is no shared memory."""
    if place.rank == 0:
        store.set("lookout", os.urandom(8).hex())
    try:
        folder = job_folder(f"lookout {store.get('lookout').decode()}")
        return folder, claim(folder)
    except (CheckpointError, OSError):
        return None, None


def _known(folder: Path | None, status: Status) -> dict[int, StatusPage]:
    """What the ranks of this host were last seen doing; this one has begun a step."""
    found: dict[int, StatusPage] = {}
    for path in folder.glob("rank-*.page") if folder is not None else []:
        rank = int(path.stem.partition("-")[2])
        seen = read_page(path.parent, rank)
        if seen is not None:
            found[rank] = seen
    own = status.page()
    assert own is not None
    return {**found, status.rank: own}


def _encode(known: Mapping[int, StatusPage], is_overdue: bool) -> str:
    """As JSON, with ages in place of times: clocks of hosts do not agree."""
    now = time.monotonic()
    pages = {rank: {**asdict(seen), "at": now - seen.at} for rank, seen in known.items()}
    return json.dumps({"pages": pages, "is_overdue": is_overdue})


def _decode(text: str) -> tuple[dict[int, StatusPage], bool]:
    """What a rank knows, and whether it finds its own wait overdue."""
    now, said = time.monotonic(), json.loads(text)
    pages = {
        int(rank): StatusPage(**{**page, "at": now - page["at"], "peers": tuple(page["peers"])})
        for rank, page in said["pages"].items()
    }
    return pages, said["is_overdue"]


class _Mail:
    """The store, asked in a thread of its own: behind a cut link it may not answer for many minutes."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._asking: threading.Thread | None = None

    def has(self, *keys: str) -> bool:
        """Whether all are there, as far as is known."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def get(self, key: str) -> str | None:
        """A value; None if it is not there, or the store does not answer."""
        return self._ask(lambda: self._store.get(key).decode()) if self.has(key) else None

    def get_all(self, prefix: str, ranks: Iterable[int]) -> dict[int, str]:
        """The values of ranks that have given one."""

        def read() -> dict[int, str]:
            keys = {rank: f"{prefix}/{rank}" for rank in ranks}
            return {rank: self._store.get(key).decode() for rank, key in keys.items() if self._store.check([key])}

        return self._ask(read) or {}

    def set(self, key: str, value: str) -> bool:
        """Whether the value is there now."""

        def write() -> bool:
            self._store.set(key, value)
            return True

        return bool(self._ask(write))

    def call(self, key: str, value: str) -> str | None:
        """The value that the first who called gave; None if the store does not answer."""
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
