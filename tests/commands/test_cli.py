"""The commands in this process: what they print, in words and in JSON, and with which status they leave."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from commands_for_tests import Weft
from rich.console import Console
from runs_for_tests import events, losses
from typer.testing import CliRunner

from weft import __version__
from weft.checkpoint import steps
from weft.cluster.local_gpus import Gpu, hide_gpus
from weft.commands import app as cli
from weft.commands import train as train_command
from weft.commands.console import LiveReporter, format_bytes, format_seconds, show_report, step_line
from weft.commands.jobs import prove
from weft.commands.output import print_text
from weft.launch.folder_lock import locked
from weft.plan import Plan
from weft.planner.predict import run_cluster
from weft.proof.prove import Check
from weft.proof.report import ProofReport
from weft.run_file import load_run
from weft.train.metrics import StepMetrics

pytestmark = pytest.mark.processes

COMMANDS = [
    "init", "train", "plan", "verify", "chaos", "evaluate", "export", "profile", "report", "generate", "serve",
    "calibrate", "index", "doctor",
]  # fmt: skip


# --- help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_an_example(command: str) -> None:
    shown = CliRunner().invoke(cli.app, [command, "--help"])
    assert shown.exit_code == 0
    assert f"Example: weft {command}" in " ".join(shown.output.split())


def test_groups_of_commands_show_an_example() -> None:
    for group in ([], ["bench"], ["tune"]):
        shown = CliRunner().invoke(cli.app, [*group, "--help"])
        assert " ".join(["Example: weft", *group]) in " ".join(shown.output.split())


def test_the_list_of_commands_is_complete() -> None:
    shown = CliRunner().invoke(cli.app, ["--help"])
    assert shown.exit_code == 0
    for command in COMMANDS:
        assert command in shown.output
    assert {command.name for command in cli.app.registered_commands} == set(COMMANDS)


def test_version(weft: Weft) -> None:
    assert weft("--version").out.strip() == __version__


# --- statuses


def test_a_run_that_was_stopped_leaves_with_75(run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.commands.train.start_ranks", lambda *_: 0)  # as ranks that save and stop
    assert weft("train", run_file, "folder=run", "--no-verify").status == 75


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_was_done_is_one_line(
    run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    before = signal.getsignal(number)
    monkeypatch.setattr("weft.run_file.check_run_file", lambda *_: os.kill(os.getpid(), number))
    left = weft("plan", run_file)
    assert left.status == 128 + number
    assert left.err == f"weft: stopped by {number.name}; there was nothing to save\n"
    assert signal.getsignal(number) is before


# --- plan


def test_plan_in_json(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, "plan.data=2", "plan.shard={degree=2, stage=3}", "cluster=h100:1x8", "--json")
    assert left.status == 0
    found = left.json
    assert {axis: degree for axis, degree in found["plan"].items() if degree > 1} == {"data": 2, "shard": 2}
    assert found["batch"].startswith("16 sequences/step = 2 data × 2 shard × 4 micro-batch × 1 accumulation")
    assert found["cluster"] == "h100"
    memory = found["memory"]
    parts = (*memory["state_bytes"].values(), memory["saved_bytes"], memory["transient_bytes"])
    assert sum(parts) == memory["total_bytes"]
    assert memory["limit_bytes"] == 80_000_000_000
    traffic = {(row["axis"], row["operation"]): row["bytes"] for row in found["traffic"]}
    assert {axis for axis, _ in traffic} == {"tokens", "losses", "state", "data", "shard"}
    assert all(num_bytes > 0 for num_bytes in traffic.values())
    assert set(found["seconds"]) == {"compute", "communication", "step"}
    assert found["seconds"]["compute"] > 0


def test_plan_in_words(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, "plan.data=2")
    assert left.status == 0
    for words in ("2 CPU", "llama", "data 2", "predicted memory per device", "all_reduce", "384 tokens/step", "a step"):
        assert words in left.out, words


@pytest.mark.parametrize("cluster", ["cluster=h100:1x8", "cluster=local"])
def test_plan_says_which_form_of_the_tensor_axes_is_better(run_file: Path, weft: Weft, cluster: str) -> None:
    left = weft("plan", run_file, "plan.tensor.x=2", cluster, "--json")
    form = left.json["better_form"]
    totals, seconds = {}, {}
    for sequence in (False, True):
        tensor = f"plan.tensor={{x=2, sequence={str(sequence).lower()}}}"
        asked = weft("plan", run_file, tensor, cluster, "--json").json
        assert asked["better_form"] == form  # whichever is asked about
        totals[sequence], seconds[sequence] = asked["memory"]["total_bytes"], asked["seconds"]["step"]
    assert totals[True] < totals[False]  # norms and residuals in parts
    assert seconds[True] <= seconds[False] * (1 + 1e-9)
    assert form["sequence"] is True
    assert form["seconds_saved"] == pytest.approx(seconds[False] - seconds[True])
    assert form["bytes_saved"] == totals[False] - totals[True]
    assert "Of the two forms of x, the sequence-sharded" in weft("plan", run_file, "plan.tensor.x=2", cluster).out
    assert "better_form" not in weft("plan", run_file, "plan.data=2", cluster, "--json").json


def test_a_plan_that_does_not_fit_is_flagged(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, "plan.data=2", "train.batch=4000000", "cluster=h100:1x8")
    assert left.status == 2
    assert "predicted memory per device" in left.out
    assert "weft: the plan does not fit: data 2, micro-batch 2000000, needs " in left.err
    assert "The nearest plan that needs less: " in left.err


def test_a_plan_larger_than_its_cluster_is_refused(run_file: Path, weft: Weft) -> None:
    left = weft("plan", run_file, "plan.data=16", "cluster=h100:1x8")
    assert left.status == 2
    assert "needs 16 devices, but h100 has 8" in left.err


def test_the_local_cluster_is_this_machine_as_often_as_there_are_hosts(
    run_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two hosts of two GPUs each run four ranks; this machine alone would have too few."""
    with hide_gpus([Gpu("Some GPU", 8 << 30, (8, 0))] * 2):
        cluster = run_cluster(load_run(run_file, ["plan.data=4"]), num_hosts=2)
    assert (cluster.num_nodes, cluster.node.num_devices) == (2, 2)


# --- what people see


@pytest.mark.parametrize(
    ("num_bytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 50, "3072.0 TiB")],
)
def test_bytes(num_bytes: int, shown: str) -> None:
    assert format_bytes(num_bytes) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.002, "2.0 ms"), (0.1, "0.10 s"), (59.99, "59.99 s"), (90, "1 min 30 s"), (3725, "1 h 2 min")],
)
def test_seconds(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown


def metrics(step: int, mfu: float | None = None) -> StepMetrics:
    return StepMetrics(step, 2.5, 0.1, 1e-3, 1000.0, 500.0, 0.25, mfu, 1 << 20, 3.0)


def test_a_step_is_one_line_with_its_rates() -> None:
    assert step_line(metrics(7, 0.412), 10) == (
        "step 7/10  loss 2.5000  grad norm 0.100  lr 1.00e-03  1,000 tokens/s  (500/device)  0.250 TFLOP/s/device  "
        "MFU 41.2%  3.00 s left  1.0 MiB"
    )
    assert "MFU" not in step_line(metrics(7), 10)
    line = "step 7/10  loss 2.5000  grad norm 0.100  lr 1.00e-03  1,000 tokens/s  3.00 s left"
    assert step_line(metrics(7, 0.412), 10, 81) == line
    assert step_line(metrics(7, 0.412), 10, 80) == line.replace("  grad norm 0.100", "")
    assert step_line(metrics(7), 10, 3) == "step 7/10"
    assert " left" not in step_line(metrics(10), 10)


def test_texts_of_a_model_do_not_change_the_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "a\tb\n\x1b[2Jc\r\x9b1m"
    print_text(text)
    assert capsys.readouterr().out == text + "\n", "a file gets the text as it is"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    print_text(text)
    assert capsys.readouterr().out == "a\tb\n\ufffd[2Jc\ufffd\ufffd1m\n"


def test_a_message_with_brackets_is_shown_as_it_is() -> None:
    shown = io.StringIO()
    LiveReporter(Console(file=shown, width=200), 10).say("saved to runs/[a]: [/b] was there")
    assert shown.getvalue() == "saved to runs/[a]: [/b] was there\n"


def test_a_long_run_shows_about_twenty_lines_where_there_is_no_terminal() -> None:
    shown = io.StringIO()
    reporter = LiveReporter(Console(file=shown, width=200), 1000)
    for step in range(1, 1001):
        reporter.step(metrics(step))
    reporter.close()
    steps_shown = [int(line.split("/")[0].removeprefix("step ")) for line in shown.getvalue().splitlines()]
    assert steps_shown == [1, *range(50, 1001, 50)]


def test_a_log_of_slow_steps_has_a_line_a_minute() -> None:
    """Twenty lines of a job of a day are one in 72 minutes: it would look hung."""
    now, shown = [0.0], io.StringIO()
    reporter = LiveReporter(Console(file=shown, width=80), 1000, 60, lambda: now[0])
    for step in range(1, 50):
        now[0] = 25.0 * step
        reporter.step(metrics(step))
    steps_shown = [int(line.split("/")[0].removeprefix("step ")) for line in shown.getvalue().splitlines()]
    assert steps_shown == [1, *range(4, 50, 3)]
    assert max(map(len, shown.getvalue().splitlines())) <= 100


def test_every_summary_of_a_command_is_whole_at_80_columns(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the command itself: two columns of a terminal stay free, and none of those of typer's runner for tests."""
    monkeypatch.setenv("COLUMNS", "80")
    for command in ([], ["bench"], ["tune"]):
        shown = weft(*command, "--help").out
        assert not [line for line in shown.splitlines()[1:] if line.endswith("...")], shown


def test_a_terminal_shows_a_bar_and_the_lines_above_it() -> None:
    shown = io.StringIO()
    reporter = LiveReporter(Console(file=shown, width=200, force_terminal=True), 3)
    for step in range(1, 4):
        reporter.step(metrics(step))
    reporter.say("step 3: held-out loss 2.0000")
    reporter.close()
    assert "held-out loss 2.0000" in shown.getvalue()
    assert "step 3/3" in shown.getvalue()
    assert "after 0:00:0" in shown.getvalue()


def test_a_terminal_of_80_columns_breaks_no_word_and_a_log_has_no_escapes() -> None:
    text = "Of the two forms of x, the sequence-sharded one is better " * 4
    for is_terminal in (True, False):
        shown = io.StringIO()
        reporter = LiveReporter(Console(file=shown, width=80, force_terminal=is_terminal), 3)
        reporter.say(text)
        for step in range(1, 4):
            reporter.step(metrics(step, 0.5))
        reporter.close()
        plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", shown.getvalue())
        lines = plain.replace("\r", "\n").splitlines()
        if is_terminal:
            assert max(map(len, lines)) <= 80
            assert {word for line in lines[:3] for word in line.split()} <= set(text.split())
        else:
            assert plain == shown.getvalue()
            assert lines[0] == text


@pytest.mark.parametrize("width", [80, 100])
def test_a_proofs_table_breaks_names_at_dots(width: int) -> None:
    name = "model.layers.11.self_attn.q_proj.weight"
    check = Check("worst parameter after the steps", "≤ 1e-09", "9.9e-14", f"rank 0, {name}", True)
    shown = io.StringIO()
    report = ProofReport(Plan(), (check,))
    show_report(Console(file=shown, width=width), report, "1 process")
    lines = [line.rstrip() for line in shown.getvalue().splitlines()]
    pieces = [piece for line in lines for piece in line.split() if piece in (name, "weight") or piece.endswith(".")]
    assert "".join(pieces) == name
    assert all(piece.endswith(".") for piece in pieces[:-1])


# --- verify


def test_verify_in_json_and_in_words(run_file: Path, weft: Weft) -> None:
    left = weft("verify", run_file, "plan.data=2", "--json")
    assert left.status == 0
    assert left.json["passed"] is True
    checks = {check["what"]: check for check in left.json["checks"]}
    assert {"loss", "gradient norm", "worst gradient", "worst parameter after the steps"} <= set(checks)
    assert {"traffic: data all_reduce", "state: optimizer"} <= set(checks)
    assert set(checks["loss"]) == {"what", "expected", "found", "where", "passed"}
    left = weft("verify", run_file, "plan.data=2")
    assert left.status == 0
    assert "verified in float64 against the sequential model: data 2" in left.out
    assert "equal" in left.out
    assert "DIFFERS" not in left.out


def test_verify_fails_with_status_1_when_the_plan_is_wrong(
    run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The control: ranks that do not reduce their gradients."""

    def keep_to_myself(self: Any) -> None:
        self._wait_reduce()

    monkeypatch.setattr("weft.sharding.flat_buffer.Flat.continue_reduce", keep_to_myself)
    left = weft("verify", run_file, "plan.data=2", "--json")
    assert left.status == 1
    assert left.json["passed"] is False
    failed = [check["what"] for check in left.json["checks"] if not check["passed"]]
    assert "worst gradient" in failed
    assert "traffic: data all_reduce" in failed
    assert left.err.splitlines()[-1].startswith("weft: data 2 differs from the sequential model in ")
    left = weft("verify", run_file, "plan.data=2")
    assert left.status == 1
    assert "DIFFERS" in left.out


def test_training_does_not_start_when_the_proof_fails(
    run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(fork_server: Any, run: Any) -> Any:
        report = prove(fork_server, run)
        return replace(report, checks=(*report.checks, Check("sum", "1", "2", "rank 0", False)))

    monkeypatch.setattr(train_command, "prove", broken)
    left = weft("train", run_file, "folder=run", "train.steps=3")
    assert left.status == 1
    assert "weft: 1 process differs from the sequential model in sum: expected 1, found 2 (rank 0)" in left.err
    assert not Path("run").exists()


# --- doctor


def test_doctor_in_json_and_in_words(weft: Weft) -> None:
    found = weft("doctor", "--json").json
    assert set(found) == {
        *("versions", "machine", "devices", "backends", "cpu_cores", "memory_free_bytes", "shared_memory_bytes"),
        *("launcher", "all_reduce", "warnings", "core_flops_per_second"),
    }
    assert all(found["core_flops_per_second"][name] > 0 for name in ("fp32", "bf16"))
    assert found["versions"]["torch"] == torch.__version__
    assert "gloo" in found["backends"]
    assert found["launcher"] == "none; weft starts local processes itself"
    assert [row["ranks"] for row in found["all_reduce"]] == [2, 2]
    assert all(row["seconds"] > 0 and row["bus_bytes_per_second"] > 0 for row in found["all_reduce"])
    left = weft("doctor", "--ranks", 3)
    assert left.status == 0
    assert "all-reduce of 4.0 MiB" in left.out
    assert "between 3 local ranks" in left.out


@pytest.mark.parametrize("seconds", [1.0, 300.0])
def test_doctor_tells_of_slow_bf16(weft: Weft, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(
        "weft.commands.doctor.cpu_flops_per_second", lambda dtype: 3e10 if dtype == torch.float32 else 3e10 / seconds
    )
    warnings = weft("doctor", "--json").json["warnings"]
    told = [one for one in warnings if "a matmul of bf16" in one]
    assert len(told) == (seconds == 300)
    assert all("takes 300 times as long as one of fp32" in one for one in told)


def test_doctor_sees_a_broken_launcher(weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert weft("doctor", "--json").json["launcher"].startswith("broken: torchrun's variables are half set")


# --- train, with one process


def test_a_run_from_its_start_to_fresh(run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training, resuming with more steps, running again when finished, and starting anew."""
    monkeypatch.setattr("weft.train.checkpoints.LONG_SECONDS", -1.0)
    own = [run_file, "folder=run", "train.schedule=constant"]
    left = weft("train", *own, "train.steps=5")
    assert left.status == 0, left.err
    assert left.err == ""
    for words in ("machine", "16 sequences/step", "verified in float64", "sequences,", "held out", "step 5/5  loss"):
        assert words in left.out, words
    assert left.out.count("per device (predicted): ") == 1
    assert "predicted memory per device" not in left.out  # the tables are those of weft plan
    assert "not done under a launcher" not in left.out
    assert re.search(r"saved step 5 in \d s\n[^a-z]*the model continues '[^']+' \(in \d+ s\):", left.out)
    assert left.out.index("held out") < left.out.index("step 1/5")
    first = losses(Path("run"))

    left = weft("train", *own, "train.steps=5")
    assert left.status == 0
    assert "This run is finished: step 5 of 5 is in run." in left.out
    kept = f"weft train {run_file} folder=run train.schedule=constant"  # suggestions keep what was given
    assert f"{kept} train.steps=5 --fresh" in left.out
    assert f"{kept} train.steps=10" in left.out
    assert "It was trained with" not in left.out
    assert losses(Path("run")) == first
    left = weft("train", *own, "train.steps=5", "model.rope_theta=9.0")  # not finished, and no old sample
    assert left.status == 2
    assert "was trained with model.rope_theta = 10000.0, now it is 9.0" in left.err
    left = weft("train", *own, "train.steps=5", "data.held_out=0.25")
    assert left.status == 2
    assert "was trained on other data: data.held_out = " in left.err
    left = weft("train", *own, "train.steps=5", "plan.micro_batch=4", "train.learning_rate=0.5")
    assert left.status == 0
    assert "It was trained with train.learning_rate = " in left.out
    assert re.search(r"plan\.micro_batch = \d+, now 4\.", left.out)
    Path("run/metrics.jsonl").rename("kept")  # a checkpoint that was copied here without them
    assert weft("train", *own, "train.steps=5", "--json").json["step"] is None
    Path("kept").rename("run/metrics.jsonl")

    left = weft("train", *own, "train.steps=8")
    assert left.status == 0
    assert re.search(r"^proved +.*: \d+ checks equal \(weft verify shows them\)$", left.out, re.MULTILINE)
    assert "resumed at step 5 from run/checkpoints/step-00000005" in left.out
    assert "verified" not in left.out
    assert len(losses(Path("run"))) == 8

    left = weft("train", *own, "train.steps=5", "--no-verify", "--fresh", "--json")
    assert left.status == 0
    assert "moved the earlier run to run.old-1" in left.err
    found = left.json
    assert (found["run"], found["folder"]) == ("tiny", "run")
    assert (found["step"]["step"], found["evaluation"]["step"]) == (5, 5)
    assert found["step"]["loss"] == first[-1]
    assert losses(Path("run")) == first
    assert len(losses(Path("run.old-1"))) == 8
    assert weft("train", *own, "train.steps=3", "--no-verify", "--fresh").status == 0
    assert steps("run.old-2/checkpoints") == [3, 5]


def test_what_needs_no_plan_is_refused_before_one_is_searched(
    run_file: Path, weft: Weft, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A search and a proof may take minutes."""
    own = [run_file, "folder=run", "train.steps=2"]
    assert weft("train", *own, "plan.data=1", "--no-verify").status == 0

    def search(*_: object) -> None:
        raise AssertionError("planned")

    monkeypatch.setattr("weft.commands.train.ask_for", search)
    left = weft("train", *own)
    assert left.status == 0, left.err
    assert "This run is finished" in left.out
    assert "plan.data" not in left.out.partition("finished")[2].partition("To start anew")[0]
    for changed, message in (
        ("data.source=nowhere", "there is no data at nowhere"),
        ("train.batch=8", "was trained with 16 sequences a step"),
        ("data.sequence=12", "was trained on other data: data.sequence = "),
        ("train.seed=3", "now 16 and 3"),
    ):
        left = weft("train", *own, "train.steps=4", changed)
        assert left.status == 2, changed
        assert message in left.err
    with locked(Path("run")):
        left = weft("train", *own, "train.steps=4")
    assert "run is in use by this process" in left.err
    Path("file").write_text("")
    assert "cannot be made" in weft("train", *own, "folder=file/run").err


def test_double_precision_trains_and_speaks(run_file: Path, weft: Weft) -> None:
    left = weft("train", run_file, "folder=run", "train.steps=3", "plan.precision=fp64", "--no-verify")
    assert (left.status, left.err) == (0, "")
    assert "the model continues" in left.out


def test_a_checkpoint_that_cannot_be_used_is_one_line_and_status_2(run_file: Path, weft: Weft) -> None:
    assert weft("train", run_file, "folder=run", "train.steps=3", "--no-verify").status == 0
    left = weft("train", run_file, "folder=run", "model.rope_theta=9.0", "--no-verify")
    assert left.status == 2
    assert left.err.splitlines() == [line for line in left.err.splitlines() if line.startswith("weft: ")]
    assert "was trained with model.rope_theta = 10000.0, now it is 9.0" in left.err


def test_generate_and_export_name_what_is_missing(tmp_path: Path, weft: Weft) -> None:
    for command in (["generate", tmp_path / "absent"], ["export", tmp_path / "absent", tmp_path / "out"]):
        left = weft(*command)
        assert left.status == 2
        assert left.err.startswith(f"weft: {tmp_path / 'absent'} does not exist; give a run folder")
    left = weft("export", tmp_path, tmp_path / "out", "--dtype", "fp8")
    assert left.status == 2
    assert left.err == "weft: --dtype fp8 is not one of fp32, bf16, fp16\n"


def test_environment_is_left_alone(run_file: Path, weft: Weft) -> None:
    before = dict(os.environ)
    weft("train", run_file, "folder=run", "train.steps=3", "--no-verify", "--json")
    assert {key: value for key, value in os.environ.items() if before.get(key) != value} == {"COLUMNS": "200"}
    assert len(events(Path("run"))) == 3
