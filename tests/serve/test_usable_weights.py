"""Weights that a server takes: at the start, by `--follow` and after a restart by one rule, on all ranks alike."""

from __future__ import annotations

import math
import shutil
import signal
from pathlib import Path

import pytest
import torch
from serve_for_tests import wait_for
from served_ranks_for_tests import damage, save_step, served_ranks

from weft.errors import ConfigError, DamagedError, NumbersError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan
from weft.saved_run import first_usable
from weft.serve.loading import load_for_generation
from weft.serve.model.ranks import ServingRanks
from weft.serve.weights.usable_weights import ServedRecord, finite, paths_to_try


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e5m2])
def test_one_bad_number_is_found(value: float, dtype: torch.dtype) -> None:
    weights = {"fine": torch.full((3, 4), 7.0), "bad": torch.zeros(3, 4), "empty": torch.empty(0)}
    weights["bad"][1, 2] = value
    read = finite(lambda name: weights[name].to(dtype), Path("folder"))
    assert read("fine")[0, 0] == 7
    assert not len(read("empty"))
    with pytest.raises(NumbersError, match="bad of folder has NaN or infinite values; use an older checkpoint"):
        read("bad")


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.safetensors", "NaN"])
def test_one_rank_takes_an_older_checkpoint(file: str, tmp_path: Path) -> None:
    save_step(tmp_path, 1)
    newest, said = save_step(tmp_path, 2, math.nan if file == "NaN" else None), list[str]()
    if file != "NaN":
        damage(newest, file)
    model, _, _ = load_for_generation(tmp_path, say=said.append)
    expected, _, _ = load_for_generation(tmp_path / "checkpoints" / "step-00000001")
    for own, other in zip(model.parameters(), expected.parameters(), strict=True):
        assert torch.equal(own, other)
    (words,) = said
    assert words.startswith(f"{newest} is left out (")
    assert words.endswith("; step-00000001 is tried")
    with pytest.raises(NumbersError if file == "NaN" else DamagedError):
        load_for_generation(newest)


@pytest.mark.processes
def test_ranks_take_the_same_weights_though_one_cannot_use_the_newest() -> None:
    paths = [Path("third"), Path("second"), Path("first")]

    def rank(index: int) -> list[object]:
        ranks, said = ServingRanks(Mesh(Plan(tensor=TensorPlan(x=2)))), list[str]()

        def use(path: Path) -> str:
            if index == 1 and path.name in ("third", "all damaged"):
                raise DamagedError(f"{path} is damaged")
            if path.name in ("second", "all damaged"):
                raise NumbersError("NaN")
            return path.name

        found = first_usable(paths, use, said.append, ranks.who_fails)
        try:
            return [found, said, first_usable([Path("all damaged")], use, said.append, ranks.who_fails)]
        except (DamagedError, NumbersError) as error:
            return [found, said, str(error)]

    of_first, of_second = run_local(rank, 2, 60)
    assert of_first == ["first", ["second is left out (NaN); first is tried"], "NaN"]
    assert of_second == ["first", ["third is left out (third is damaged); second is tried"], "all damaged is damaged"]


def test_another_error_is_not_answered_by_older_weights() -> None:
    tried = list[Path]()

    def use(path: Path) -> None:
        tried.append(path)
        raise ConfigError("no tokenizer")

    with pytest.raises(ConfigError):
        first_usable([Path("newer"), Path("older")], use, lambda message: None)
    assert tried == [Path("newer")]


def test_weights_that_were_served_come_first_while_they_exist(tmp_path: Path) -> None:
    said, record = list[str](), ServedRecord(tmp_path / "served")
    for step in (1, 2, 3):
        save_step(tmp_path / "run", step)

    def names() -> list[str]:
        return [path.name for path in paths_to_try(tmp_path / "run", record.read(), said.append)]

    assert names() == ["step-00000003", "step-00000002", "step-00000001"]
    record.write("step-00000002")
    assert names() == ["step-00000002", "step-00000003", "step-00000001"]
    assert said == []
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000002")
    assert names() == ["step-00000003", "step-00000001"]
    assert said == [
        f"step-00000002, which was served, is no longer in {tmp_path / 'run'}; the newest checkpoint is taken"
    ]
    (tmp_path / "config.json").touch()
    assert paths_to_try(tmp_path, "any", said.append) == [tmp_path]
    assert ServedRecord().read() is None
    ServedRecord(tmp_path / "none" / "served").write("no such folder")


@pytest.mark.processes
def test_ranks_start_again_with_the_weights_that_they_served(tmp_path: Path) -> None:
    """The newest checkpoint is damaged at the start; newer ones are followed; then ranks are lost, and the newest
    checkpoints are damaged or have NaN.
    """
    run = tmp_path / "run"
    save_step(run, 1)
    damage(save_step(run, 2))
    with served_ranks(run, "plan.tensor.x=2", "--follow") as served:
        served.wait_for_weights(1)
        assert "step-00000002 is left out (" in served.said
        save_step(run, 3)
        served.wait_for_weights(3)
        right = served.text()
        for step, value in ((4, math.nan), (5, None)):
            folder = save_step(tmp_path / "aside", step, value)
            if value is None:
                damage(folder)
            folder.rename(run / "checkpoints" / folder.name)
            wait_for(lambda folder=folder: f"{folder.name} is not served (" in served.said)
        for number in (1, 2):
            before = served.ranks()
            served.kill(-1, signal.SIGKILL)
            wait_for(lambda before=before: not set(before) & set(served.ranks()) and served.health()[0] == 200)
            served.wait_for_weights(3)
            assert served.text() == right
            assert f"restart {number} of at most 5" in served.said
        served.process.send_signal(signal.SIGTERM)
        assert served.process.wait(60) == 0


@pytest.mark.processes
def test_without_follow_ranks_start_again_with_the_same_weights(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = save_step(run, 1)
    with served_ranks(run, "plan.pipe=2") as served:
        right = served.text()
        save_step(run, 2)
        before = served.ranks()
        served.kill(0, signal.SIGKILL)
        wait_for(lambda: not set(before) & set(served.ranks()) and served.health() == (200, first.name))
        assert served.text() == right
        shutil.rmtree(first)
        served.kill(0, signal.SIGKILL)
        served.wait_for_weights(2)
        assert "step-00000001, which was served, is no longer in" in served.said
