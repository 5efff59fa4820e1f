"""Options of serving: declared once, and read by commands, docs, the table of refusals, the planner and ranks."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from commands_for_tests import Weft

from weft.commands.serving_options import reference
from weft.errors import ConfigError, PlanError
from weft.plan import Pipe, Plan
from weft.serve.refusals import REFUSALS, ServingCase, refuse
from weft.serve.spec import DEVICES, OPTIONS, ServingSpec, default_on, flag_of, option_of

ROOT = Path(__file__).parents[2]
TOY = """    toy: int = option(
        0,
        "toys of a step",
        commands=ALL,
        minimum=0,
        maximum=9,
        priced=("cuda",),
        recurrent=False,
    )
"""


def test_the_page_of_options_is_made_from_the_spec() -> None:
    assert (ROOT / "docs" / "serving_options.md").read_text(encoding="utf-8") == reference(), (
        "run: python -m weft.commands.serving_options > docs/serving_options.md"
    )


def test_a_spec_is_written_as_the_options_of_a_command() -> None:
    assert ServingSpec(weights="int4", resident_blocks=1).arguments("plan") == " --weights int4 --resident-blocks 1"


def test_a_value_out_of_its_range_or_choices_is_refused() -> None:
    for given, words in (
        ({"max_running": 0}, "max_running = 0 is less than 1; give 1 or more"),
        ({"port": 65536}, "port = 65536 is more than 65535; give 65535 or less"),
        ({"log": "all"}, "--log all is unknown; give rates, requests or none"),
        ({"adapters": ("fine",)}, "--adapter 'fine' must be name=FOLDER, each name once"),
    ):
        with pytest.raises(ConfigError, match=f"^{re.escape(words)}$"):
            ServingSpec(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, one in OPTIONS.items() if not option_of(one).recurrent])
def test_what_recurrent_models_do_not_have_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"a recurrent model .*; leave out {flag_of(OPTIONS[name])}$"):
        refuse(ServingCase({name: 1}, model="recurrent"))


def test_recurrent_models_are_served_on_one_rank_with_their_head_as_it_is() -> None:
    with pytest.raises(ConfigError, match=r"a recurrent model .*; leave out the plan and --head$"):
        refuse(ServingCase({"head": "int8"}, Plan(data=2), model="recurrent"))


def test_defaults_of_a_gpu_are_used_on_one() -> None:
    sizes = [(default_on("max_running", one), default_on("token_budget", one)) for one in DEVICES]
    assert sizes == [(64, 512), (256, 2048)]
    assert default_on("swap_blocks", "cuda") == 0


def test_every_row_of_the_table_is_met() -> None:
    class Cache:
        name, identity, loki = "loki", "of a model", True

    two, stages, cache = Plan(data=2), Plan(data=2, pipe=Pipe(2)), Cache()
    cases = [
        ServingCase({"precision": "fp32"}, device="cuda"),
        ServingCase({"share_gpus": True}, device="cpu"),
        ServingCase({"head": "graph=x"}, device="cuda"),
        ServingCase({"head": "int8"}, device="cuda"),
        ServingCase({"follow": True, "calibration": "x", "weights": "int4"}, two),
        ServingCase({"follow": True, "stream_weights": 1}),
        ServingCase({"follow": True, "head": "graph=x"}),
        ServingCase({"follow": True, "cache": "loki=x"}, cache=cache),  # type: ignore[arg-type]
        ServingCase({"resident_blocks": 1}),
        ServingCase({"calibration": "x"}),
        ServingCase({"merge_adapter": "x", "weights": "int4"}),
        ServingCase({"adapters": ("a=b",)}, on_ranks=True),
        ServingCase({"adapters": ("a=b",)}, has_codes=True),
        ServingCase({"adapters": ("a=b",), "stream_weights": 1}),
        ServingCase({"swap_blocks": 1}, on_ranks=True),
        ServingCase({"head": "graph=x"}, on_ranks=True),
        ServingCase({"speculate": "layers=1"}, on_ranks=True),
        ServingCase({"speculate": "folder"}, draft="recurrent"),
        ServingCase({"stream_weights": 1}, stages),
        ServingCase({"stream_weights": 1, "cache": "loki=x"}, two, cache=cache),  # type: ignore[arg-type]
    ]
    assert len(cases) == len(REFUSALS)
    for case, row in zip(cases, REFUSALS, strict=True):
        assert [one for one in REFUSALS if one.when(case)] == [row], case
        with pytest.raises((ConfigError, PlanError), match=f"; {re.escape(row.remedy)}$"):
            refuse(case)


PROGRAM = """
import sys
from pathlib import Path
from typer.testing import CliRunner
from weft.commands.app import app
from weft.commands.serving_options import reference
from weft.errors import ConfigError
from weft.plan import Plan
from weft.serve.http import local_ranks_server
from weft.serve.http.addresses import listen
from weft.serve.http.run_server import Serving
from weft.serve.refusals import ServingCase, refuse
from weft.serve.spec import ServingSpec

run = lambda *arguments: CliRunner(env={"COLUMNS": "200"}).invoke(app, arguments)
for command in ("serve", "generate", "plan"):
    assert "--toy" in run(command, "--help").output, command
assert "| `--toy` | serve, generate, plan --serve | `0` | toys of a step |" in reference()
local_ranks_server.run_rank = lambda serving, rank, *rest: Path(f"rank-{rank.rank}").write_text(str(serving.spec.toy))
serving = Serving(Path(), ServingSpec(toy=3), Plan(data=2), print, print)
assert local_ranks_server.start_server(serving, listen("127.0.0.1", 0)) == 0
assert [Path(f"rank-{rank}").read_text() for rank in (0, 1)] == ["3", "3"]
assert ServingSpec(toy=3).arguments("plan") == " --toy 3"
asked = ("plan", "--serve", "--model", "llama3-8b", "--cluster", "h200:1x1", "--requests", "2")
done = run(*asked, "--toy", "3")
assert "weft serve FOLDER --toy 3" in done.output, (done.output, done.exception)
assert run(*asked, "--toy", "10").exit_code == 2
assert "--toy is about serving the model" in str(run("plan", "--model", "x", "--toy", "3").exception)
for case, words in (
    (ServingCase.of(ServingSpec(toy=3), model="recurrent"), "leave out --toy"),
    (ServingCase.of(ServingSpec(toy=3), device="cpu", is_planned=True), "--toy is not priced on a CPU"),
):
    try:
        refuse(case)
    except ConfigError as error:
        assert words in str(error)
    else:
        raise AssertionError(words)
"""


@pytest.mark.processes
def test_an_option_is_declared_in_one_file(tmp_path: Path) -> None:
    """A toy option, added to the spec of a copy of weft, is found in help, docs, refusals, plans and on ranks."""
    shutil.copytree(ROOT / "weft", tmp_path / "weft", ignore=shutil.ignore_patterns("__pycache__"))
    spec = tmp_path / "weft" / "serve" / "spec.py"
    text, line = spec.read_text(), "    speculate: str | None = option("
    assert text.count(line) == 1
    spec.write_text(text.replace(line, TOY + line))
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=300, cwd=tmp_path, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_address_is_refused_before_torch_is_loaded(weft: Weft, tmp_path: Path) -> None:
    with patch("weft.commands.serving_options.chosen_device", side_effect=AssertionError("it looks for a GPU")):
        for given in (("--host", "0.0.0.0"), ("--api-key", "a b")):
            left = weft("serve", tmp_path, *given)
            assert left.status == 2, left.err
            assert "loading" not in left.err
