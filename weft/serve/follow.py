"""Serves the newest checkpoint of a run that still trains: newer weights are taken between two steps of the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from weft.checkpoint import latest
from weft.errors import ConfigError

Say = Callable[[str], None]
T = TypeVar("T")


async def follow(
    run: Path,
    weights: str,
    load: Callable[[Path], T],
    replace: Callable[[T, str], Awaitable[None]],
    say: Say,
    seconds: float = 2.0,
) -> None:
    """Watch a run folder for ever. `weights` are the ones in use; `replace` is given newer ones, with their name:
    what `load` returns, which may be a model.

    A checkpoint that cannot be used is tried once and passed over: it is damaged, was removed meanwhile, is of another
    model, or its training diverged.
    """
    folder, tried, trouble = run / "checkpoints", weights, ""
    while True:
        try:
            newest, found = await asyncio.to_thread(latest, folder), ""
        except OSError as error:  # as of a network file system, which may come back
            newest, found = None, f"{folder} cannot be read ({error}); the weights in use stay"
        if found and found != trouble:
            say(found)
        trouble = found
        if newest is not None and newest.name > tried:
            tried = newest.name
            await _take(newest, load, replace, say)
        await asyncio.sleep(seconds)


async def _take(
    newest: Path, load: Callable[[Path], T], replace: Callable[[T, str], Awaitable[None]], say: Say
) -> None:
    """Replace the weights in use by those of a checkpoint. Nothing of it is held afterwards."""
    try:
        await replace(await asyncio.to_thread(load, newest), newest.name)
    except Exception as error:  # whatever it is, requests go on
        say(f"{newest} is not served ({type(error).__name__}: {error}); the weights in use stay")
    else:
        say(f"serving {newest.name}")


def require_run(source: Path) -> None:
    """Raise ConfigError unless a folder is a run that may get newer checkpoints."""
    if latest(source / "checkpoints") is None:
        raise ConfigError(f"--follow needs a run folder with a checkpoint; '{source}' has none in its checkpoints/")
