"""`--follow`: the newest checkpoint is taken once it is complete; one that cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import gc
import weakref
from contextlib import suppress
from pathlib import Path

import pytest
from serve_for_tests import RepeatingEngine, is_in_event_loop
from torch import nn

from weft.checkpoint.folder import latest, step_name
from weft.checkpoint.manifest import MANIFEST
from weft.errors import ConfigError, DamagedError, NumbersError
from weft.serve.http import run_server
from weft.serve.http.run_server import follow, require_run
from weft.serve.worker import EngineWorker


def save(run: Path, step: int) -> str:
    """A complete checkpoint, as far as its folder goes."""
    folder = run / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    return folder.name


def test_newer_checkpoints_are_taken_and_bad_ones_passed_over(tmp_path: Path) -> None:
    first, taken, said = save(tmp_path, 1), [], list[str]()
    bad = {step_name(2): NumbersError("bias has NaN or infinite values"), step_name(3): DamagedError("is damaged")}

    def load(path: Path) -> nn.Module:
        if path.name in bad:
            raise bad[path.name]
        return nn.Linear(2, 2)

    async def replace(model: nn.Module, weights: str) -> None:
        taken.append(weights)

    async def watch() -> None:
        task = asyncio.create_task(follow(tmp_path, first, load, replace, said.append, seconds=0.01))
        for step in (2, 3, 4, 7):
            (tmp_path / "checkpoints" / f".{step_name(step)}").mkdir()  # a save that is not complete
            save(tmp_path, step)
            async with asyncio.timeout(60):
                while not said or step_name(step) not in said[-1]:
                    await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(watch())
    assert taken == [step_name(4), step_name(7)]
    assert len(said) == 4
    assert "NumbersError: bias has NaN or infinite values); the weights in use stay" in said[0]
    assert "is damaged" in said[1]
    assert said[2:] == [f"serving {step_name(4)}", f"serving {step_name(7)}"]


def test_a_model_is_read_beside_the_event_loop_and_let_go_of(tmp_path: Path) -> None:
    first, said, loops = save(tmp_path, 1), list[str](), list[bool]()
    models = list[weakref.ref[nn.Module]]()

    def load(path: Path) -> nn.Module:
        loops.append(is_in_event_loop())
        model = nn.Linear(2, 2)
        models.append(weakref.ref(model))
        return model

    async def replace(model: nn.Module, weights: str) -> None:
        assert models[-1]() is model
        if weights == step_name(3):
            raise ConfigError("another model")

    async def watch() -> None:
        task = asyncio.create_task(follow(tmp_path, first, load, replace, said.append, seconds=0.01))
        async with asyncio.timeout(60):
            for step in (2, 3):
                save(tmp_path, step)
                while len(said) < step - 1:
                    await asyncio.sleep(0.01)
                while models[-1]() is not None:
                    gc.collect()
                    await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(watch())
    assert loops == [False, False]
    assert "another model" in said[1]


def test_a_checkpoint_older_than_the_weights_in_use_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The newest is older where a run has gone back and removed what it had saved."""
    taken, polls, said = list[str](), list[Path](), list[str]()
    save(tmp_path, 3)

    def polled(folder: Path) -> Path | None:
        polls.append(folder)
        return latest(folder)

    async def replace(model: str, weights: str) -> None:
        taken.append(weights)

    async def watch() -> None:
        task = asyncio.create_task(follow(tmp_path, step_name(5), lambda path: "", replace, said.append, 0.001))
        async with asyncio.timeout(60):
            while len(polls) < 3:
                await asyncio.sleep(0.01)
            save(tmp_path, 6)
            while not said or step_name(6) not in said[-1]:
                await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(run_server, "latest", polled)
    asyncio.run(watch())
    assert taken == [step_name(6)]


class RefusingEngine(RepeatingEngine):
    def replace_weights(self, model: nn.Module) -> None:
        raise ConfigError("another model")


def test_a_model_that_the_engine_refuses_is_let_go_of_at_once() -> None:
    """Not when Python next looks for objects that hold each other."""
    worker = EngineWorker(RefusingEngine())

    async def refused() -> weakref.ref[nn.Module]:
        model = nn.Linear(2, 2)
        with suppress(ConfigError):
            await worker.replace_weights(model)
        return weakref.ref(model)

    async def watch() -> None:
        worker.start()
        async with asyncio.timeout(60):
            model = await refused()
            while model() is not None:
                await asyncio.sleep(0.01)
        worker.close()

    gc.disable()
    try:
        asyncio.run(watch())
    finally:
        gc.enable()
    assert worker.join(60)


def test_a_folder_that_cannot_be_read_for_a_while_is_followed_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, said, polls = save(tmp_path, 1), list[str](), list[int]()
    save(tmp_path, 2)

    def flaky(folder: Path) -> Path | None:
        polls.append(1)
        if len(polls) < 4:
            raise OSError(116, "Stale file handle")
        return latest(folder)

    async def replace(model: str, weights: str) -> None: ...

    async def watch() -> None:
        task = asyncio.create_task(follow(tmp_path, first, lambda path: "model", replace, said.append, seconds=0.01))
        async with asyncio.timeout(60):
            while not task.done() and len(said) < 2:
                await asyncio.sleep(0.01)
        task.cancel()

    monkeypatch.setattr(run_server, "latest", flaky)
    asyncio.run(watch())
    assert said == [
        f"{tmp_path / 'checkpoints'} cannot be read ([Errno 116] Stale file handle); the weights in use stay",
        f"serving {step_name(2)}",
    ]


def test_what_is_followed_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--follow needs a run folder"):
        require_run(tmp_path)
    save(tmp_path, 1)
    require_run(tmp_path)
