"""Saving from the loop: a save that fails is told in one line, and training goes on.

The checkpoint before is whole, the step is lost only if the run dies before the next save, and a full disk may have
room again by then. Only the last save of a run must work: without it there would be nothing to go on from.
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
_FINISH_SECONDS = 120.0  # for a save in flight, when a rank fails


def save_or_tell(
    saver: Saver, step: int, pieces: Iterable[Piece], state: dict[str, Any], asynchronous: bool, is_last: bool
) -> None:
    """Save a step. What kept it, or the one before, from being saved is told, and raised if it is the last."""
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
    """End the save under way on all ranks; what kept it from being saved is told. `agree` asks all ranks."""
    error = saver.settle(agree)
    if error is not None:
        _tell(error, "the newest checkpoint before it is used")


def finish_on_error(saver: Saver, status: Status) -> Callable[..., None]:
    """For an ExitStack: a rank that fails leaves when the save in flight has its name, or cannot get it in time.

    The other ranks wait for this one meanwhile and write their parts; the agent would end them all as soon as it left.
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
    with suppress(Exception):  # the rank's own error is told
        saver.wait(published=True)


def _tell(error: BaseException, what_now: str) -> None:
    logger.warning("weft: a checkpoint was not saved: %s; %s", error, what_now)
