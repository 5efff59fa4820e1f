"""Run files as users meet them: the reference of all keys, `weft init`, and where each value of a run came from."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from commands_for_tests import Weft, caller

from weft.commands.run_reference import TABLES, Table, keys, reference
from weft.run_file import load_run

ROOT = Path(__file__).parents[2]


@pytest.fixture
def weft(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path) -> Weft:
    monkeypatch.chdir(tmp_path)
    return caller(monkeypatch, capfd)


def test_the_reference_is_that_of_the_dataclasses() -> None:
    assert (ROOT / "docs" / "run_file.md").read_text(encoding="utf-8") == reference(), (
        "run: python -m weft.commands.run_reference > docs/run_file.md"
    )


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.cls.__name__)
def test_each_field_says_what_it_means(table: Table) -> None:
    silent = [key.name for key in keys(table.cls) if not key.meaning]
    assert not silent, f'beside the types of {silent}, say what they mean: Annotated[int, "steps of the run"]'


def test_init_writes_a_run_file_that_loads(weft: Weft) -> None:
    assert weft("init", "run.toml").out.startswith("wrote run.toml; what it costs: weft plan run.toml;")
    run = load_run(Path("run.toml"))
    assert (run.name, run.model.num_layers, run.data.held_out, run.cluster) == ("run", 4, 0.05, "local")
    assert all("  # " in line for line in Path("run.toml").read_text().splitlines() if " = " in line)
    left = weft("init", "run.toml")
    assert (left.status, left.err) == (2, "weft: run.toml exists; give another name, or remove it\n")
    assert "there is no data at texts; give a file" in weft("init", "other.toml", "--data", "texts").err
    for name in ("llama3-8b", "gpt-1.7b"):
        assert weft("init", f"{name}.toml", "--model", name, "--cluster", "h100:1x8").status == 0
        assert load_run(Path(f"{name}.toml")).plan.precision == "bf16"
    assert "did you mean" in weft("init", "typo.toml", "--model", "llama3-8").err


def test_every_value_is_printed_with_its_origin(weft: Weft) -> None:
    weft("init", "run.toml")
    left = weft("train", "run.toml", "--print-config", "train.steps=1e3", "plan.shard.degree=2")
    assert left.status == 0
    lines = left.out.splitlines()
    assert 'name = "run"  # default' in lines
    assert "hidden_size = 128  # run.toml" in lines
    assert "steps = 1000  # override" in lines
    assert "shard = { degree = 2, stage = 3 }  # override" in lines
    assert "beta2 = 0.95  # default" in lines
    assert 'precision = "fp32"  # usual on a CPU' in lines
    assert "# batch_tokens is not set" in lines
    tables = tomllib.loads(left.out)  # and it is a run file
    Path("printed.toml").write_text(left.out)
    assert load_run(Path("printed.toml")).train == load_run(Path("run.toml"), ["train.steps=1000"]).train
    assert tables["name"] == "run"
