"""`--follow`: the newest checkpoint is taken once it is complete; one that cannot be used changes nothing."""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from weft.checkpoint.folder import step_name
from weft.checkpoint.manifest import MANIFEST
from weft.errors import ConfigError, DamagedError
from weft.serve.follow import follow, require_run


def save(run: Path, step: int) -> str:
    """A complete checkpoint, as far as its folder goes."""
    folder = run / "checkpoints" / step_name(step)
    folder.mkdir(parents=True)
    (folder / MANIFEST).write_text("{}")
    return folder.name


def test_newer_checkpoints_are_taken_and_bad_ones_passed_over(tmp_path: Path) -> None:
    first, taken, said = save(tmp_path, 1), [], list[str]()
    bad = {step_name(2): math.nan, step_name(3): None}  # diverged, damaged

    def load(path: Path) -> nn.Module:
        if path.name not in bad:
            return nn.Linear(2, 2)
        value = bad[path.name]
        if value is None:
            raise DamagedError(f"{path} is damaged")
        model = nn.Linear(2, 2)
        nn.init.constant_(model.bias, value)
        return model

    async def replace(model: nn.Module, weights: str) -> None:
        assert all(torch.isfinite(value).all() for value in model.parameters())
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


def test_what_is_followed_is_a_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--follow needs a run folder"):
        require_run(tmp_path)
    save(tmp_path, 1)
    require_run(tmp_path)
