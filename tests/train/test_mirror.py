"""Mirrored images: the same draws under every layout, others in each epoch, and never of held-out images."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from weft.errors import ConfigError
from weft.mesh import UnconnectedMesh
from weft.plan import Plan
from weft.run_file import Run, load_run
from weft.train.batches import TrainingData, prepare_data

RUN_FILE = """
[model]
architecture = "resnet"

[data]
kind = "slides"
images = 10
size = 32
cache = "{cache}"
mirror = true

[train]
steps = 4
batch = 8

[plan]
precision = "fp32"
"""


@pytest.fixture
def run(tmp_path: Path) -> Run:
    path = tmp_path / "slides.toml"
    path.write_text(RUN_FILE.format(cache=tmp_path / "cache"))
    return load_run(path)


def images(run: Run, data: TrainingData, step: int, num_ranks: int) -> torch.Tensor:
    """The images of a step on all ranks of `data`, in the order of the batch."""
    run = replace(run, plan=replace(run.plan, data=num_ranks))
    meshes = [UnconnectedMesh(run.plan, rank) for rank in range(num_ranks)]
    parts = [data.host_batches(run, step, mesh["batch"]) for mesh in meshes]
    return torch.cat([part[number][0] for number in range(len(parts[0])) for part in parts])


def test_draws_do_not_depend_on_the_layout_and_change_with_the_epoch(run: Run, tmp_path: Path) -> None:
    plain = load_run(tmp_path / "slides.toml", ["data.mirror=false"])
    data, num_mirrored, was_mirrored = prepare_data(run), 0, dict[bytes, set[bool]]()
    for step in range(4):  # more than three epochs
        ours, before = images(run, data, step, 1), images(plain, data, step, 1)
        for other in (2, 4):
            assert torch.equal(images(run, data, step, other), ours)
        for image, original in zip(ours, before, strict=True):
            is_mirrored = torch.equal(image, original.flip(-1))
            assert is_mirrored != torch.equal(image, original)
            num_mirrored += is_mirrored
            was_mirrored.setdefault(original.numpy().tobytes(), set()).add(is_mirrored)
    assert 4 < num_mirrored < 28
    assert any(len(both) == 2 for both in was_mirrored.values())
    held_out = [
        d.evaluation_batches(r, UnconnectedMesh(Plan(), 0)["batch"], torch.device("cpu"))
        for d, r in ((data, run), (data, plain))
    ]
    assert all(torch.equal(one[0], two[0]) for one, two in zip(*held_out, strict=True))


def test_tiles_of_columns_are_refused(tmp_path: Path, run: Run) -> None:
    with pytest.raises(ConfigError, match=r"data.mirror = true needs whole rows of images, and plan.tile.columns = 2"):
        load_run(tmp_path / "slides.toml", ["plan.tile.columns=2"])
