"""What README and examples tell a newcomer to type really works."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import LlamaConfig, LlamaForCausalLM

import weft
from weft.commands import app as cli
from weft.commands.main import main
from weft.run_file import check_run_file, load_run

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
USAGE_ERROR = typer.BadParameter.__mro__[1]  # of the click that typer uses, which may be its own
# Added to `weft train` lines, so that the test is about the command and not about training.
TINY = [
    "train.steps=2",
    "train.warmup_steps=1",
    "train.evaluate_sequences=8",
    "model.hidden_size=24",
    "model.intermediate_size=32",
    "model.num_hidden_layers=1",
    "data.sequence=16",
    "plan.data=1",
    "plan.shard=1",
]


def readme_commands() -> list[str]:
    """Every `weft ...` line in README's code blocks."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    lines = [line.partition("#")[0].strip() for block in blocks for line in block.splitlines()]
    return [line for line in lines if line.startswith("weft ")]


def test_readme_commands_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)
    commands = readme_commands()
    assert {shlex.split(command)[1] for command in commands} == {
        "init", "train", "plan", "verify", "generate", "export", "serve", "doctor",
    }  # fmt: skip
    for command in commands:
        arguments = shlex.split(command)
        if arguments[1] == "train":
            arguments += [*TINY, "--no-verify"]
        if arguments[1] == "generate":
            arguments += ["--tokens", "4"]
        if arguments[1] == "serve":
            arguments += ["--help"]  # it would not end
        if "--model" in arguments:  # a smaller question of the same kind
            arguments = [{"llama3-70b": "llama-1.2b", "h100:32x8": "h100:1x8"}.get(one, one) for one in arguments]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as left:
            main()
        captured = capfd.readouterr()
        assert left.value.code in (0, None), f"{command}: {captured.err}"
    assert (tmp_path / "my-model" / "config.json").is_file()


def commands_of_docs() -> list[str]:
    """Every `weft ...` line in code blocks of README and docs, and every example of a help, without comments."""
    found = []
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        text = path.read_text(encoding="utf-8")
        blocks = "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))
        found += re.findall(r"^(?:    )?(weft [a-z].*)$", blocks, re.MULTILINE) + re.findall(
            r"(?m)^    (weft [a-z].*)$", text
        )
    for command in leaf_commands(command_line()):
        examples = re.split(r"; (?:or: )?|, then: |, after ", (command.epilog or "").removeprefix("Example: "))
        assert examples[0].startswith("weft "), f"the help of {command.name} has no example"
        found += [example for example in examples if example.startswith("weft ")]
    return found


@cache
def command_line() -> Any:
    """The parser of all commands, which takes a while to make."""
    return typer.main.get_command(cli.app)


def leaf_commands(command: Any) -> Iterator[Any]:
    for one in getattr(command, "commands", {"": command}).values():
        yield from leaf_commands(one) if hasattr(one, "commands") else [one]


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """The command's name and its parameters, by the parser that the command line has."""
    command = command_line()
    name, *words = shlex.split(line.partition(" | ")[0], comments=True)
    while hasattr(command, "commands"):
        name = words.pop(0)
        assert name in command.commands, line
        command = command.commands[name]
    return name, command.make_context(name, words).params


def test_commands_of_docs_and_helps_are_understood() -> None:
    """Their options exist, and so do the keys of a run file that they change. README's are run above."""
    lines = commands_of_docs()
    assert len(lines) > 50
    for line in lines:
        _, params = parsed(line)
        changes = [change for change in params.get("overrides") or [] if "=" in change]
        check_run_file(ROOT / "examples" / "quickstart.toml", [*changes])
    for wrong in ("weft plan run.toml --were pipe=4", "weft bench serv runs/x", "weft export runs/x"):
        with pytest.raises((USAGE_ERROR, AssertionError)):
            parsed(wrong)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.toml")), ids=lambda path: path.stem)
def test_example_run_files_are_valid(path: Path) -> None:
    assert load_run(path).split.batch > 0


def test_the_example_of_an_own_model_proves_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "own_model.py"), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+) on 4 processes", last)
    assert found is not None
    assert float(found[2]) < float(found[1])


def test_the_notebook_proves_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    """Its cells in order, as a kernel runs them; the script beside it has the same code."""
    notebook = json.loads((ROOT / "examples" / "own_model.ipynb").read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["metadata"]["kernelspec"]["name"]) == (4, "python3")
    names: dict[str, object] = {"__name__": "__main__"}
    for number, cell in enumerate(notebook["cells"]):
        if cell["cell_type"] == "code":
            assert cell["outputs"] == []
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+) on 4 processes", capsys.readouterr().out.splitlines()[-1])
    assert found is not None
    assert float(found[2]) < float(found[1])


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


# Files of other projects that weft's text names, and a placeholder.
ELSEWHERE = {
    "src/predictor.py", "megatron/core/distributed/distributed_data_parallel.py", "file.py", "submit_benchmarks.py",
    "distributed_data_parallel.py", "bf16_optimizer.py",
}  # fmt: skip


def missing_files(text: str, folder: Path) -> set[str]:
    """Python files that a text in `folder` names, from there or from the root or weft/, and that do not exist."""
    names = set(re.findall(r"(?<![\w<{*./-])(?:[\w-]+/)*\w+\.py\b(?!:\d)", text)) - ELSEWHERE
    return {name for name in names if not any((base / name).is_file() for base in (folder, ROOT, ROOT / "weft"))}


def test_files_that_docs_and_docstrings_name_exist() -> None:
    paths = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "weft").rglob("*.py")]
    missing = {str(path): missing_files(path.read_text(encoding="utf-8"), path.parent) for path in paths}
    assert {path: names for path, names in missing.items() if names} == {}


def test_a_file_that_does_not_exist_is_found() -> None:
    assert missing_files("see `comm/ledger.py` and `comm/leger.py`, or units.py", ROOT / "docs") == {
        "comm/leger.py", "units.py",
    }  # fmt: skip


def test_the_four_lines_for_a_model_of_transformers_prove_it() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    (lines,) = [block for block in blocks if "LlamaForCausalLM" in block]
    names = {"torch": torch, "weft": weft, "LlamaConfig": LlamaConfig, "LlamaForCausalLM": LlamaForCausalLM}
    exec(compile(lines, "README.md", "exec"), names)
