"""The training loop on forked ranks: the same curve under every layout, and what a run leaves in its folder."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from runs_for_tests import LAYOUTS, events, losses, make_run, train_on_ranks, write_run_file, write_text

from weft.checkpoint import Checkpoint, steps
from weft.comm import Axis, Ledger
from weft.data.order import batch_indices
from weft.errors import ConfigError, DataError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import LocalError, run_local
from weft.mesh import Mesh
from weft.models import build, initialise, save_folder
from weft.parallel.apply import parallelize
from weft.parallel.model_state import named_pieces
from weft.run_file import Run, load_run
from weft.step.examples import example_inputs
from weft.step.train_step import evaluate
from weft.train import loop, setup
from weft.train.batches import prepare_data
from weft.train.early_stopping import EarlyStopping
from weft.train.metrics import MetricsLog, read_events

pytestmark = pytest.mark.processes

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run_file(tmp_path_factory.mktemp("train"))


# --- equal curves


FOUR_LAYOUTS = {
    "1 process": ["plan.data=1", "plan.shard=1"],
    "2 data": ["plan.data=2", "plan.shard=1"],
    "4 shard-3": ["plan.data=1", "plan.shard=4"],
    "2 data x 2 shard-3": ["plan.data=2", "plan.shard=2"],
}


def compare_curves(folder: Path, overrides: list[str], timeout_seconds: float) -> None:
    curves, held_out = {}, {}
    for name, layout in FOUR_LAYOUTS.items():
        own = [f"folder={folder / name}", f"data.cache={folder / 'cache'}"]
        run = load_run(QUICKSTART, [*overrides, *layout, *own])
        train_on_ranks(run, timeout_seconds)
        curves[name] = losses(run.folder)
        held_out[name] = [event["loss"] for event in events(run.folder, "evaluation")]
    reference = curves["1 process"]
    assert len(reference) == 50
    assert reference[-1] < 0.75 * reference[0]  # it learns, so equal curves are not equal noise
    for name in FOUR_LAYOUTS:
        assert curves[name] == pytest.approx(reference, rel=TOLERANCE), name
        assert held_out[name] == pytest.approx(held_out["1 process"], rel=TOLERANCE), name


@pytest.mark.soak
def test_fifty_steps_of_a_shrunk_quickstart_agree_under_four_layouts(tmp_path: Path) -> None:
    small = ["model.hidden_size=64", "model.intermediate_size=160", "model.num_hidden_layers=2"]
    small += ["model.num_attention_heads=4", "data.sequence=64", "train.batch=8", "plan.micro_batch=2"]
    source = write_text(tmp_path / "text.txt")
    compare_curves(tmp_path, [*small, "train.steps=50", f"data.source={source}"], 60)


@pytest.mark.soak
def test_fifty_steps_of_the_quickstart_agree_under_four_layouts(tmp_path: Path) -> None:
    compare_curves(tmp_path, ["train.steps=50"], 600)


def test_the_loop_does_what_plain_torch_does(run_file: Path) -> None:
    """The same twelve steps written out: data order, warm-up and cosine, clipping, decay of matrices only."""
    run = make_run(run_file, "plain", "train.steps=12", "train.clip=0.5", "train.weight_decay=0.3")
    data = prepare_data(run)
    model = build(run.model)
    initialise(model, run.train.seed)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    expected = []
    for step in range(12):
        done = (step - 3) / 9
        rate = 1e-2 * ((step + 1) / 3 if step < 3 else 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * done)))
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, labels = data.train.get(batch_indices(step, 16, len(data.train), seed=0))
        loss = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), labels.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    train_on_ranks(run)
    assert losses(run.folder) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "layout",
    [
        ["plan.micro_batch=4"],
        ["plan.data=2", "plan.micro_batch=2"],
        ["plan.shard={degree=2, stage=2}", "plan.micro_batch=4", 'plan.memory.accumulate="slice"'],
        ["plan.shard={degree=2, stage=3}", "plan.micro_batch=1", 'plan.memory.recompute="full"'],
        ["plan.data=2", "plan.shard={degree=2, stage=1}", "plan.micro_batch=2", 'plan.memory.recompute="selective"'],
        ["train.batch_tokens=384", "plan.data=2"],
    ],
    ids=" ".join,
)
@pytest.mark.sampled(2)
def test_accumulation_and_memory_policies_do_not_change_the_curve(
    run_file: Path, tmp_path: Path, layout: list[str]
) -> None:
    file = run_file
    if any(override.startswith("train.batch_tokens") for override in layout):
        file = tmp_path / "tokens.toml"
        file.write_text(run_file.read_text().replace("batch = 16\n", ""))  # 16 sequences of 24 tokens = 384
    runs = [
        load_run(path, [f"folder={tmp_path / name}", "train.steps=8", *overrides])
        for name, path, overrides in (("plain", run_file, []), ("split", file, layout))
    ]
    for run in runs:
        train_on_ranks(run)
    assert runs[1].split.batch == 16
    assert losses(runs[1].folder) == pytest.approx(losses(runs[0].folder), rel=TOLERANCE)


def test_bfloat16_follows_float32_roughly(run_file: Path) -> None:
    runs = [make_run(run_file, f"precision {p}", "plan.shard=2", f"plan.precision={p}") for p in ("fp32", "bf16")]
    for run in runs:
        train_on_ranks(run)
    assert losses(runs[1].folder) == pytest.approx(losses(runs[0].folder), rel=0.02)
    assert losses(runs[1].folder) != losses(runs[0].folder)


def test_deterministic_runs_are_equal_to_the_bit(run_file: Path) -> None:
    runs = [
        make_run(run_file, f"deterministic {n}", "train.deterministic=true", "plan.data=2", "train.steps=5")
        for n in "ab"
    ]
    for run in runs:
        train_on_ranks(run)
    assert losses(runs[0].folder) == losses(runs[1].folder)

    def rank(index: int) -> bool:
        setup.set_determinism(runs[0])
        return torch.are_deterministic_algorithms_enabled()

    assert run_local(rank, 1) == [True]


def test_another_seed_is_another_run(run_file: Path) -> None:
    runs = [make_run(run_file, f"seed {seed}", f"train.seed={seed}", "train.steps=3") for seed in (0, 1)]
    for run in runs:
        train_on_ranks(run)
    assert losses(runs[0].folder)[0] != losses(runs[1].folder)[0]


# --- evaluation


def evaluate_on_ranks(runs: list[Run]) -> list[list[float]]:
    """Each rank's losses of runs that differ in their micro-batches only."""
    run, data = runs[0], prepare_data(runs[0])

    def rank(index: int) -> list[float]:
        mesh = Mesh(run.plan)
        model = parallelize(
            setup.build_model(run), run.plan, mesh, setup.first_values(run), partial(example_inputs, run)
        )
        batches = (data.evaluation_batches(one, mesh["batch"], mesh.device) for one in runs)
        return [float(evaluate(model, own, mesh)) for own in batches]

    return run_local(rank, run.plan.num_ranks)


def test_evaluation_is_equal_under_every_layout_and_micro_batch(run_file: Path) -> None:
    """Eleven sequences divide by none of the layouts: what fills up the last batches must not count."""
    run = make_run(run_file, "evaluate")
    data = prepare_data(run)
    assert data.held_out is not None
    assert len(data.held_out) > 11
    model = build(run.model)
    initialise(model, run.train.seed)
    inputs, labels = data.held_out.get(torch.arange(11).numpy())
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1).double(), labels.flatten()).item()
    for layout in LAYOUTS.values():
        runs = [make_run(run_file, "evaluate", *layout, f"plan.micro_batch={size}") for size in (1, 2)]
        for found in evaluate_on_ranks(runs):
            assert found == pytest.approx([expected] * 2, rel=1e-6), layout


def test_nothing_held_out_means_no_evaluation(run_file: Path) -> None:
    run = make_run(run_file, "no evaluation", "data.held_out=0", "train.steps=3", "train.evaluate_every=1")
    assert train_on_ranks(run)["evaluation_loss"] is None
    assert events(run.folder, "evaluation") == []


@pytest.mark.parametrize("degree", [1, 3, 4])
@pytest.mark.parametrize("micro_batch", [1, 5])
def test_the_ranks_evaluate_every_held_out_sequence_once(run_file: Path, degree: int, micro_batch: int) -> None:
    run = make_run(
        run_file,
        "once",
        f"train.batch={degree * micro_batch}",
        f"plan.micro_batch={micro_batch}",
        f"plan.data={degree}",
    )
    data = prepare_data(run)
    batches = [
        data.evaluation_batches(run, Axis("batch", degree, index, None, Ledger()), torch.device("cpu"))
        for index in range(degree)
    ]
    assert len({len(one) for one in batches}) == 1  # or ranks would wait for each other in vain
    counted = [tuple(row.tolist()) for one in batches for batch in one for row in batch[1] if (row >= 0).any()]
    assert data.held_out is not None
    expected = data.held_out.get(torch.arange(11).numpy())[1]
    assert sorted(counted) == sorted(tuple(row.tolist()) for row in expected)


# --- the run folder


def test_metrics_say_what_a_step_did(run_file: Path) -> None:
    run = make_run(run_file, "metrics", "plan.data=2", "train.evaluate_every=5", "log.tensorboard=true")
    outcome = train_on_ranks(run)
    last = events(run.folder)[-1]
    assert last["loss"] == outcome["loss"]
    assert last["grad_norm"] > 0
    assert last["memory_bytes"] > 1 << 20
    assert last["tokens_per_second"] == pytest.approx(2 * last["tokens_per_second_per_device"])
    assert last["seconds_left"] == 0
    assert last["mfu"] is None
    mean = 0.0  # of a step's seconds: it moves, because single steps may take far longer or shorter
    for event in events(run.folder)[1:]:  # the first step also compiles and connects
        seconds = 16 * 24 / event["tokens_per_second"]
        mean += (0.1 if mean else 1.0) * (seconds - mean)
        assert event["seconds_left"] == pytest.approx((15 - event["step"]) * mean)
    assert [event["learning_rate"] for event in events(run.folder)[:3]] == pytest.approx([1e-2 / 3, 2e-2 / 3, 1e-2])
    evaluations = events(run.folder, "evaluation")
    assert [event["step"] for event in evaluations] == [5, 10, 15]
    assert evaluations[-1]["loss"] == outcome["evaluation_loss"]
    assert read_tensorboard(run.folder, "step/loss") == pytest.approx(dict(enumerate(losses(run.folder), 1)))
    assert list(read_tensorboard(run.folder, "evaluation/loss")) == [5, 10, 15]


def read_tensorboard(folder: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder / "tensorboard"))
    accumulator.Reload()
    return {event.step: event.value for event in accumulator.Scalars(tag)}


def test_log_every_logs_every_nth_and_the_last(run_file: Path) -> None:
    run = make_run(run_file, "log every", "train.log_every=4")
    train_on_ranks(run)
    assert [event["step"] for event in events(run.folder)] == [4, 8, 12, 15]


def test_after_a_crash_every_step_is_logged_once(run_file: Path) -> None:
    """A run that is killed has logged steps that its last checkpoint does not know; it takes them again."""
    run = make_run(run_file, "crash", "log.tensorboard=true", "train.evaluate_every=4")
    train_on_ranks(run)
    whole, evaluations = losses(run.folder), events(run.folder, "evaluation")
    for step in (9, 12, 15):
        shutil.rmtree(run.folder / "checkpoints" / f"step-{step:08d}")
    with open(run.folder / "metrics.jsonl", "a") as file:
        file.write('{"kind": "step", "st')  # the kill came in the middle of a line
    train_on_ranks(run)
    assert losses(run.folder) == whole
    found = events(run.folder, "evaluation")
    assert [(e["step"], e["loss"]) for e in found] == [(e["step"], e["loss"]) for e in evaluations]
    assert read_tensorboard(run.folder, "step/loss") == pytest.approx(dict(enumerate(whole, 1)))


def test_metrics_that_cannot_be_written_anew_are_kept(
    run_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """On a full disk, with lines of steps that are done again, the last of which is incomplete."""
    run = make_run(run_file, "no room")
    run.folder.mkdir()
    lines = [json.dumps({"kind": "step", "step": step}) + "\n" for step in (1, 2, 3)]
    path = run.folder / "metrics.jsonl"
    path.write_text("".join(lines) + '{"kind": "st')

    def write(self: Path, data: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as full:
        full.setattr(Path, "write_bytes", write)
        log = MetricsLog(run, 2)
    log.write("step", 3, {})
    log.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3, 3]
    assert "metrics.jsonl cannot be written anew (No space left on device): it keeps lines after step 2" in caplog.text
    assert not list(run.folder.glob("*.tmp"))


def test_a_full_disk_under_tensorboard_does_not_end_the_run(run_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = "tensorboard cannot be written (No space left on device): nothing is logged there"
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for number, fails in enumerate(("__init__", "add_scalar", "close"), 1):
        run = make_run(run_file, f"full {fails}", "log.tensorboard=true")
        with patch(f"torch.utils.tensorboard.SummaryWriter.{fails}", side_effect=full):
            log = MetricsLog(run, 0)
            for step in (1, 2):
                log.write("step", step, {"loss": 1.0})
            log.close()
        assert caplog.text.count(told) == number, fails
        assert [event["step"] for event in read_events(run.folder / "metrics.jsonl")] == [1, 2]


def test_damaged_lines_of_metrics_are_left_out(run_file: Path) -> None:
    run = make_run(run_file, "damaged metrics", "train.evaluate_every=2", "train.patience=2")
    run.folder.mkdir()
    lines = [json.dumps({"kind": "evaluation", "step": step, "loss": 1.0}).encode() for step in (2, 4, 6)]
    damage = [b"\0" * 8 + lines[0], b"\xff\xfe", b"[2]", b'{"kind": "step"}', b"[" * 100_000]
    path = run.folder / "metrics.jsonl"
    path.write_bytes(b"\n".join([lines[0], *damage, *lines[1:]]) + b"\n")
    assert [event["step"] for event in read_events(path)] == [2, 4, 6]
    assert EarlyStopping(run, 6).wants_stop()
    MetricsLog(run, 4).close()
    assert path.read_bytes() == b"\n".join(lines[:2]) + b"\n"


def test_a_finished_run_is_left_alone(run_file: Path) -> None:
    run = make_run(run_file, "finished", "train.steps=3")
    train_on_ranks(run)
    before = (run.folder / "metrics.jsonl").read_bytes()
    assert train_on_ranks(run) == {"step": 3, "finished": True, "loss": None, "evaluation_loss": None}
    assert (run.folder / "metrics.jsonl").read_bytes() == before
    assert steps(run.folder / "checkpoints") == [3]


def test_a_run_goes_on_when_given_more_steps(run_file: Path) -> None:
    runs = [make_run(run_file, "more", f"train.steps={n}", "train.schedule=constant") for n in (4, 15)]
    for run in runs:
        train_on_ranks(run)
    whole = make_run(run_file, "at once", "train.schedule=constant")
    train_on_ranks(whole)
    assert losses(runs[1].folder) == losses(whole.folder)


def test_dropout_repeats_after_a_resume(run_file: Path, tmp_path: Path) -> None:
    model = 'architecture = "gpt2"\nn_positions = 24\nn_embd = 24\nn_layer = 2\nn_head = 2\nresid_pdrop = 0.2\n'
    file = tmp_path / "gpt2.toml"
    file.write_text("[model]\n" + model + run_file.read_text()[run_file.read_text().index("[data]") :])
    run = load_run(file, [f"folder={tmp_path / 'run'}", "plan.shard=2", "plan.micro_batch=4"])
    train_on_ranks(run)
    whole = losses(run.folder)
    for step in (9, 12, 15):
        shutil.rmtree(run.folder / "checkpoints" / f"step-{step:08d}")
    train_on_ranks(run)
    assert losses(run.folder) == whole
    still = load_run(file, [f"folder={tmp_path / 'still'}", "plan.shard=2", "model.resid_pdrop=0.0"])
    train_on_ranks(still)
    assert losses(still.folder) != whole  # the control: dropout was on


def test_the_checkpoint_says_what_made_it(run_file: Path) -> None:
    run = make_run(run_file, "says", "plan.data=2", "train.steps=3")
    train_on_ranks(run)
    state = Checkpoint(run.folder / "checkpoints" / "step-00000003").state
    assert state["data"]["samples"] == 3 * 16
    assert state["seed"] == 0
    assert "data = 2  # override" in state["run"]
    assert "steps = 3  # override" in state["run"]
    assert "batch = 16  # tiny.toml" in state["run"]


# --- a run that cannot go on


def refusal(run: Run) -> str:
    with pytest.raises(LocalError) as caught:
        train_on_ranks(run)
    return str(caught.value)


def test_other_data_is_refused_on_resume(run_file: Path, tmp_path: Path) -> None:
    run = make_run(run_file, "other data", "train.steps=3")
    train_on_ranks(run)
    other = write_text(tmp_path / "other.txt", num_words=5000)
    message = refusal(make_run(run_file, "other data", f"data.source={other}"))
    assert "CheckpointError" in message
    assert "was trained on other data" in message


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("data.sequence=12", "data.sequence = 24, now 12"),
        ("data.documents=separate", "data.documents = 'joined', now 'separate'"),
        ("data.held_out=0.1", "data.held_out = 0.05, now 0.1"),
    ],
)
def test_other_samples_of_the_same_data_are_refused_on_resume(run_file: Path, override: str, words: str) -> None:
    name = f"other {override}".replace("=", " ")
    train_on_ranks(make_run(run_file, name, "train.steps=3"))
    message = refusal(make_run(run_file, name, override))
    assert "CheckpointError" in message
    assert f"was trained on other data: {words}" in message


def test_the_same_data_may_lie_elsewhere(run_file: Path, tmp_path: Path) -> None:
    train_on_ranks(make_run(run_file, "moved data", "train.steps=3"))
    moved = tmp_path / "moved.txt"
    moved.write_bytes((run_file.parent / "text.txt").read_bytes())
    elsewhere = [f"data.source={moved}", f"data.cache={tmp_path / 'cache'}", "data.text_field=content"]
    assert train_on_ranks(make_run(run_file, "moved data", "train.steps=4", *elsewhere))["step"] == 4


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("model.hidden_size=48", "hidden_size"),
        ("model.num_hidden_layers=1", "num_hidden_layers"),
        ("model.rope_theta=5000.0", "rope_theta"),  # the same shapes, another network
    ],
)
def test_another_model_is_refused_on_resume(run_file: Path, override: str, words: str) -> None:
    name = f"other model {words}"
    train_on_ranks(make_run(run_file, name, "train.steps=3"))
    message = refusal(make_run(run_file, name, override))
    assert "CheckpointError" in message
    assert f"model.{words}" in message


def test_missing_data_is_told_before_any_process_group_exists(run_file: Path, tmp_path: Path) -> None:
    """Also under a launcher, where nobody has prepared the data before."""
    run = make_run(run_file, "no data", "plan.data=2", f"data.source={tmp_path / 'absent'}")
    with (
        patch.object(setup, "init_process_group", side_effect=AssertionError("a group was made")),
        pytest.raises(DataError, match="there is no data at"),
    ):
        loop.train(run, RankInfo(0, 2, 0, 2, 1, "torchrun"), Reports())


class Reports:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def step(self, metrics: Any) -> None: ...

    def say(self, message: str) -> None:
        self.said.append(message)


def test_a_gpu_that_is_not_there_is_refused(run_file: Path) -> None:
    run = make_run(run_file, "gpu", "train.device=cuda")
    with patch.object(torch.cuda, "is_available", lambda: False), pytest.raises(ConfigError, match=r"train\.device"):
        setup.device_type(run)


# --- starting from a model


def test_training_starts_from_a_hugging_face_folder(run_file: Path, tmp_path: Path) -> None:
    plain = make_run(run_file, "from folder")
    model = build(plain.model)
    initialise(model, seed=77)
    save_folder(tmp_path / "model", model)
    text = f'[model]\nfrom = "{tmp_path / "model"}"\n' + run_file.read_text()[run_file.read_text().index("[data]") :]
    file = tmp_path / "from.toml"
    file.write_text(text)
    run = load_run(file, [f"folder={tmp_path / 'run'}", "plan.shard=2", "train.steps=4", "data.tokenizer=bytes"])
    assert run.model == plain.model
    expected = dict(model.named_parameters())

    def rank(index: int) -> list[str]:
        split = parallelize(setup.build_model(run), run.plan, Mesh(run.plan), setup.first_values(run))
        return [
            part.parameter.name
            for part, piece in named_pieces(split)
            if not torch.equal(piece, expected[part.parameter.name].flatten()[part.start : part.stop])
        ]

    assert run_local(rank, 2) == [[], []]
    train_on_ranks(run)
    seeded = make_run(run_file, "from folder", "train.seed=0", "train.steps=4")
    train_on_ranks(seeded)
    assert losses(run.folder)[0] != losses(seeded.folder)[0]
    assert json.loads((tmp_path / "model" / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]


def test_a_save_that_fails_ends_the_run_with_its_reason(run_file: Path) -> None:
    run = make_run(run_file, "full disk", "train.steps=6")

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with patch("weft.checkpoint.save.save_file", fail):
        message = refusal(run)
    assert "No space left on device" in message
