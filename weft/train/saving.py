"""Saving during training: a failed save is reported in one line, and training continues.

The checkpoint before is complete. The step is lost only if the run dies before the next save, and a full disk may have
space again by then. Only a run's last save must succeed: without it there would be
nothing to continue from.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from weft.checkpoint import Piece, Saver
from weft.errors import CheckpointError
from weft.health.rank_status import SAVING, Status

logger = logging.getLogger("weft")
_FINISH_SECONDS = 120.0  # to finish a save in flight when a rank fails


def save_or_tell(
    saver: Saver, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool, is_last: bool
) -> None:
    """Saves a step.

    Logs a warning if this save, or the one before, failed. Raises if this save failed and is the last.
    """
    try:
        saver.wait()
    except CheckpointError as error:
        _tell(error, "training went on, and tries again now")
    try:
        saver.save(step, pieces, state, asynchronous)
    except CheckpointError as error:
        if is_last:
            raise
        _tell(error, "training goes on, and tries again at the next save")


def settle_or_tell(saver: Saver, agree: Callable[[bool], bool]) -> None:
    """Ends the save in flight on all ranks, and logs a warning if it failed.

    `agree` returns whether all ranks passed true.
    """
    error = saver.settle(agree)
    if error is not None:
        _tell(error, "the newest checkpoint before it is used")


def finish_on_error(saver: Saver, status: Status) -> Callable[..., None]:
    """Returns a callback for an ExitStack: a rank that fails finishes the save in flight before it exits.

    It waits until the save is complete, but at most 120 s. The other ranks wait for this one in the meantime and write
    their parts. The agent would end them all as soon as this rank exits.
    """

    def leave(kind: object, error: BaseException | None, trace: object) -> None:
        if error is None or not saver.is_in_flight:
            return
        status.phase(SAVING)
        waiting = threading.Thread(target=_wait_quietly, args=(saver,), daemon=True)
        waiting.start()
        waiting.join(_FINISH_SECONDS)

    return leave


def _wait_quietly(saver: Saver) -> None:
    with suppress(Exception):  # the rank's own error is reported
        saver.wait(published=True)


def _tell(error: BaseException, what_now: str) -> None:
    logger.warning("weft: a checkpoint was not saved: %s; %s", error, what_now)
