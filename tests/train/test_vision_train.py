"""Training on images: the same curve under every layout, as plain torch has it, and what is refused or left out."""

from __future__ import annotations

import json
import math
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from runs_for_tests import Silent, events, losses, make_run, train_on_ranks
from safetensors.torch import load_file
from sampled_for_tests import one_in, some_soak

from weft.checkpoint import Checkpoint, latest
from weft.commands.main import main
from weft.data import images
from weft.data.config import SlidesConfig
from weft.data.order import batch_indices
from weft.data.slides import make_slide, slide_folder, write_slide
from weft.errors import CheckpointError, ConfigError, DataError, PlanError, WeftError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import VisionConfig, build, config_from_table, initialise
from weft.parallel.apply import parallelize
from weft.planner.predict import predict, run_cluster
from weft.proof.prove import verify_run
from weft.run_file import Run, load_run
from weft.step.objective import CLASSIFICATION
from weft.step.task import ImageTask, LanguageTask, task_of
from weft.step.train_step import evaluate
from weft.train import loop, setup
from weft.train.batches import prepare_data

pytestmark = pytest.mark.processes

RUN_FILE = """
[model]
architecture = "resnet"
depth = 10
width = 4
norm = "group"

[data]
kind = "slides"
images = 60
size = 32
cache = "{folder}/cache"

[train]
steps = 6
batch = 8
learning_rate = 5e-3
evaluate_sequences = 11
evaluate_every = 3

[checkpoint]
every = 3
keep_last = 9

[plan]
micro_batch = 4
"""
BATCH_NORM = "model.norm=batch"


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    path = folder / "tiny.toml"
    path.write_text(RUN_FILE.format(folder=folder))
    return path


def measured(folder: Path) -> list[tuple[float, float]]:
    return [(event["loss"], event["accuracy"]) for event in events(folder, "evaluation")]


# --- curves


@pytest.fixture(scope="module")
def reference(run_file: Path) -> Run:
    run = make_run(run_file, "reference")
    train_on_ranks(run)
    assert len(losses(run.folder)) == 6
    assert 0 < measured(run.folder)[-1][1] < 1  # neither all right nor none, so equal shares are not empty words
    return run


@pytest.mark.parametrize(
    "layout",
    one_in(
        2,
        [
            "plan.data=2 plan.shard.degree=2 plan.shard.stage=2 plan.micro_batch=2",
            "plan.data=2",
            "plan.pipe=2 plan.micro_batch=2",
            "plan.shard=2 plan.micro_batch=1",
            "plan.tile.columns=2 plan.tile.hand_over=batch plan.data=2",
            "plan.tile.rows=2 plan.tile.columns=2",
            "plan.memory.recompute=full",
            "plan.tensor.x=2",
        ],
    ),
)
@pytest.mark.sampled(2)
def test_no_layout_changes_the_curve_or_what_is_right(run_file: Path, reference: Run, layout: str) -> None:
    run = make_run(run_file, layout, *layout.split())
    train_on_ranks(run)
    assert losses(run.folder) == pytest.approx(losses(reference.folder), rel=1e-4)
    for found, expected in zip(measured(run.folder), measured(reference.folder), strict=True):
        assert found[0] == pytest.approx(expected[0], rel=1e-4)
        assert found[1] == expected[1]


@pytest.mark.soak
def test_the_example_of_slides_has_the_same_curve_on_one_rank_and_on_its_tiles(tmp_path: Path) -> None:
    """With statistics over the batch, which no tile has alone; shrunk."""
    example = Path(__file__).parents[2] / "examples" / "pathology.toml"
    small = ["train.steps=3", "train.warmup_steps=1", "train.batch=8", "plan.micro_batch=8", "data.size=64"]
    small += ["data.images=24", "train.evaluate_every=3", "train.evaluate_sequences=8", f"data.cache={tmp_path}"]
    tiles = load_run(example, [f"folder={tmp_path / 'tiles'}", *small])
    whole = load_run(example, [f"folder={tmp_path / 'whole'}", *small, "plan.tile={rows=1, columns=1}"])
    assert tiles.plan.tile.degree == 4
    for run in (tiles, whole):
        train_on_ranks(run)
    assert losses(tiles.folder) == pytest.approx(losses(whole.folder), rel=1e-4)


def test_the_loop_does_what_plain_torch_does_with_running_statistics(run_file: Path) -> None:
    run = make_run(run_file, "plain", BATCH_NORM, "plan.micro_batch=8", "train.clip=0.5", "train.weight_decay=0.3")
    data = prepare_data(run)
    model = build(run.model)
    initialise(model, 0)
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.3}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    expected = []
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 5e-3 * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * step / 6)))
        images, labels = data.train.get(batch_indices(step, 8, len(data.train), seed=0))
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        expected.append(loss.item())
    train_on_ranks(run)
    assert losses(run.folder) == pytest.approx(expected, rel=1e-4)
    newest = latest(run.folder / "checkpoints")
    assert newest is not None
    saved = Checkpoint(newest)
    statistics = dict(model.named_buffers())
    assert {entry.name for entry in saved.entries("buffer")} == set(statistics)
    for name, buffer in statistics.items():
        assert torch.allclose(saved.read(name, "buffer"), buffer, rtol=1e-3, atol=1e-5), name
    assert data.held_out is not None
    images, labels = data.held_out.get(np.arange(11))
    model.eval()
    with torch.no_grad():
        logits = model(images)
    loss, accuracy = measured(run.folder)[-1]
    assert loss == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-3)
    assert accuracy == pytest.approx((logits.argmax(1) == labels).double().mean().item())


def test_a_resumed_run_repeats_one_that_never_stopped(run_file: Path) -> None:
    stopped = make_run(run_file, "stopped", BATCH_NORM, "train.schedule=constant", "train.steps=3")
    steady = make_run(run_file, "steady", BATCH_NORM, "train.schedule=constant")
    train_on_ranks(steady)
    train_on_ranks(stopped)
    train_on_ranks(make_run(run_file, "stopped", BATCH_NORM, "train.schedule=constant"))
    assert losses(stopped.folder) == losses(steady.folder)
    assert measured(stopped.folder) == measured(steady.folder)
    with pytest.raises(WeftError, match="was trained on other data"):
        train_on_ranks(make_run(run_file, "stopped", BATCH_NORM, "data.seed=1"))
    with pytest.raises(WeftError, match=r"was trained on other data: data\.held_out = .*, now 0\.45"):
        train_on_ranks(make_run(run_file, "stopped", BATCH_NORM, "data.held_out=0.45"))


@pytest.mark.parametrize("precision", ["fp64", "bf16"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_other_precisions(run_file: Path, reference: Run, precision: str, norm: str) -> None:
    name = f"{precision} {norm}"
    run = make_run(run_file, name, f"plan.precision={precision}", f"model.norm={norm}", "train.steps=3")
    train_on_ranks(run)
    found = losses(run.folder)
    assert all(math.isfinite(loss) for loss in found)
    assert math.isfinite(measured(run.folder)[-1][0])
    if norm == "group":
        assert found[0] == pytest.approx(losses(reference.folder)[0], rel=1e-5 if precision == "fp64" else 2e-2)


def test_classes_split_over_ranks_have_the_same_right_ones(run_file: Path) -> None:
    """With x = 2 each rank holds the logits of some classes; four classes, so that each holds several."""
    plain = make_run(run_file, "", "model.num_classes=4")
    split = make_run(run_file, "", "model.num_classes=4", "plan.tensor.x=2")
    data = prepare_data(plain)

    def measure(run: Run) -> list[float]:
        mesh = Mesh(run.plan)
        model = parallelize(setup.build_model(run), run.plan, mesh, setup.first_values(run))
        batches = data.evaluation_batches(run, mesh["batch"], mesh.device)
        found: list[float] = evaluate(model, batches, mesh, CLASSIFICATION).tolist()
        return found

    (expected,) = run_local(lambda _: measure(plain), 1)
    assert expected[1] > 0
    for found in run_local(lambda _: measure(split), 2):
        assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.soak
def test_a_small_network_learns_what_needs_the_whole_slide(tmp_path: Path) -> None:
    overrides = ["data.images=640", "data.size=64", "model.width=8", "model.norm=batch", "plan.micro_batch=32"]
    overrides += ["train.steps=75", "train.batch=32", "train.learning_rate=2e-3", "train.warmup_steps=10"]
    overrides += ["train.weight_decay=0.05", "train.evaluate_sequences=128", "train.evaluate_every=75"]
    path = tmp_path / "learns.toml"
    path.write_text(RUN_FILE.format(folder=tmp_path))
    run = make_run(path, "learns", *overrides)
    loop.train(run, RankInfo(), Silent())
    loss, accuracy = measured(run.folder)[-1]
    assert accuracy > 0.9
    assert loss < 0.3


# --- proofs and predictions

ARCHITECTURES = {
    "resnet18": ["model.depth=18"],
    "resnext50": ["model.depth=50", "model.groups=32", "model.width_per_group=64"],
    "deep-resnet": [],
    "amoebanet-d": ["model.layers=3", "model.filters=32"],
}


def run_of(run_file: Path, name: str, *overrides: str) -> Run:
    """A run whose model is of another architecture."""
    text = run_file.read_text()
    if not name.startswith("res"):
        text = text.replace('architecture = "resnet"\ndepth = 10\nwidth = 4\n', f'architecture = "{name}"\n')
    path = run_file.parent / f"{name}.toml"
    path.write_text(text)
    return load_run(path, [*ARCHITECTURES[name], *overrides])


@pytest.mark.parametrize("name", some_soak(ARCHITECTURES, "resnet18", "deep-resnet"))
def test_plans_of_group_norms_are_proved(run_file: Path, name: str) -> None:
    verify_run(run_of(run_file, name, "plan.shard=2", "plan.micro_batch=2")).require()


@pytest.mark.parametrize("name", some_soak(["deep-resnet", "amoebanet-d"], "deep-resnet"))
def test_pipelines_of_batch_norms_are_proved(run_file: Path, name: str) -> None:
    verify_run(run_of(run_file, name, BATCH_NORM, "plan.pipe=2", "plan.micro_batch=2")).require()


def test_statistics_of_a_split_batch_are_refused_unless_asked_for(run_file: Path) -> None:
    run = make_run(run_file, "", BATCH_NORM, "plan.data=2")
    with pytest.raises(PlanError, match=r"layer 'bn1' takes statistics over the batch, which data = 2 splits"):
        predict(run, run_cluster(run))
    loose = make_run(run_file, "", BATCH_NORM, "plan.data=2", "plan.exact=false")
    assert predict(loose, run_cluster(loose)).cost.memory_bytes > 0


def test_a_prediction_follows_the_size_of_the_images(run_file: Path) -> None:
    runs = [make_run(run_file, "", f"data.size={size}", "cluster=h100:1x1") for size in (64, 128)]
    small, large = (predict(run, run_cluster(run)) for run in runs)
    assert large.cost.saved_bytes == pytest.approx(4 * small.cost.saved_bytes, rel=0.02)
    assert large.cost.state_bytes == small.cost.state_bytes
    assert small.step_seconds is not None
    assert small.is_modelled


def test_tasks() -> None:
    image = ImageTask((300, 200, 3))  # type: ignore[arg-type]
    images, labels = image.example(2, torch.bfloat16)
    assert (images.shape, images.dtype, labels.shape) == ((2, 3, 300, 200), torch.bfloat16, (2,))
    assert LanguageTask(12).example(2, torch.float32)[0].shape == (2, 12)


def test_a_task_is_shrunk_to_what_its_model_takes(run_file: Path) -> None:
    run = run_of(run_file, "amoebanet-d", "data.size=160")
    task = task_of(run).shrunk(run.model.shrunk())
    assert isinstance(task, ImageTask)
    assert task.shape == (64, 64, 3)
    images, labels = task.random(run.model, 50, seed=1)
    assert images.shape == (50, 3, 64, 64)
    assert 0 < int((labels == -100).sum()) < 50
    assert torch.equal(images, task.random(run.model, 50, seed=1)[0])


# --- images of a folder


@pytest.fixture
def folder_run(tmp_path: Path) -> Path:
    """A run file of a folder of images, one of which is cut off."""
    folder = tmp_path / "scans"
    folder.mkdir()
    lines = ["image,label"]
    for index in range(24):
        slide = make_slide(0, index, 32)
        write_slide(folder / f"{index}.npy", slide)
        lines.append(f"{index}.npy,{slide.label}")
    (folder / "labels.csv").write_text("\n".join(lines))
    broken = folder / "5.npy"
    broken.write_bytes(broken.read_bytes()[:-100])
    path = tmp_path / "folder.toml"
    data = f'kind = "images"\nsource = "{folder}"\nheight = 32\nwidth = 32\n'
    text = RUN_FILE.format(folder=tmp_path)
    start, end = text.index('kind = "slides"'), text.index("[train]")
    text = text[:start] + data + text[end:]
    path.write_text(text.replace("width = 4\n", "width = 4\nnum_classes = 2\n"))
    return path


def test_the_classes_of_a_folder_are_those_of_its_labels(folder_run: Path) -> None:
    """A ResNet had 1,000 for the labels 0 and 1."""
    folder_run.write_text(folder_run.read_text().replace("num_classes = 2\n", ""))
    run = load_run(folder_run)
    assert isinstance(run.model, VisionConfig)
    assert run.model.num_classes == 2
    assert load_run(folder_run, ["model.num_classes=7"]).model != run.model


class Told(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, message: str) -> None:
        self.lines.append(message)


def test_a_resumed_run_notices_a_changed_pixel_of_an_image(folder_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though name, size and time stay, and the bytes in the middle of the file; other times alone are no change."""

    def train(steps: int) -> None:
        loop.train(make_run(folder_run, "run", "data.on_bad=skip", f"train.steps={steps}"), RankInfo(), Silent())

    def write(number: int) -> None:
        with path.open("r+b") as file:
            file.seek(-1, 2)
            file.write(bytes([number]))
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))

    monkeypatch.setattr(images, "SAMPLED_BYTES", 16)
    path = folder_run.parent / "scans" / "7.npy"
    before, last = path.stat(), path.read_bytes()[-1]
    train(1)
    write(last ^ 1)
    with pytest.raises(
        CheckpointError, match=r"was trained on other data: .*images of hash [0-9a-f]{64}, now [0-9a-f]"
    ):
        train(2)
    write(last)
    train(2)
    write(last ^ 1)
    monkeypatch.setattr(images, "MAX_HASHED_BYTES", 1000)  # what is too large to be hashed is said beside the data
    run = make_run(folder_run, "run", "data.on_bad=skip")
    assert "a resume compares sizes and a few bytes of each image" in prepare_data(run).description
    train(3)


def test_a_truncated_image_is_named_skipped_and_counted_or_fatal(folder_run: Path) -> None:
    run = make_run(folder_run, "stops", "train.steps=2")
    with pytest.raises(DataError, match=r"5\.npy cannot be used: .*set data\.on_bad = 'skip'"):
        loop.train(run, RankInfo(), Silent())
    run, told = make_run(folder_run, "skips", "train.steps=2", "data.on_bad=skip"), Told()
    loop.train(run, RankInfo(), told)
    assert told.lines[0].startswith("1 of the images of ")
    assert "are left out, 5.npy first: " in told.lines[0]
    (event,) = events(run.folder, "data")
    assert (event["skipped"], event["names"]) == (1, ["5.npy"])
    data = prepare_data(run)
    assert data.held_out is not None
    assert len(data.train) + len(data.held_out) == 23


def test_metrics_count_images(reference: Run) -> None:
    last = events(reference.folder)[-1]
    assert last["images_per_second"] > 0
    assert "tokens_per_second" not in last
    assert "unit" not in last


# --- run files and commands


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["data.kind=slide"], "unknown 'data.kind' = 'slide'; did you mean 'slides'"),
        (["data.sequence=8"], "unknown key 'data.sequence'"),
        (["data.size=20"], "data.size = 20; it must be from 32 to"),
        (["data.images=1"], "data.images = 1; it must be at least 2"),
        (["data.held_out=1.0"], r"data\.held_out = 1\.0; it is a fraction"),
        (["model.num_classes=1"], "slides have 3 channels and 2 classes; given .* model.num_classes = 1"),
        (["model.in_channels=1"], "slides have 3 channels and 2 classes; given model.in_channels = 1"),
        (["plan.context=2"], r"plan\.context = 2 splits sequences, and the data is of images; use context = 1"),
        (["train.batch=7", "plan.micro_batch=7", "plan.data=2"], "batch = 7 images does not divide over 2 ranks"),
        (["plan.micro_batch=3"], "plan.micro_batch = 3 does not divide the 8 images of each rank"),
    ],
)
def test_bad_run_files(run_file: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(WeftError, match=message):
        load_run(run_file, overrides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[model]\narchitecture = \"resnet\"\ndepth = 10\nwidth = 4\nnorm = \"group\"", "[model]"),
         "model.architecture = 'llama' reads text, and data.kind = 'slides' gives images; use 'resnet'"),
        (("\"resnet\"\ndepth = 10", "\"unet\"\ndepth = 2"), "gives a class to each pixel, and data"),
        (("\"resnet\"\ndepth = 10\nwidth = 4", "\"amoebanet-d\""), None),
        (("\"resnet\"\ndepth = 10\nwidth = 4", "\"amoebanet-d\"\n[data]\nkind=\"slides\"\nsize = 48\n[log]"),
         "images of 48 × 48 pixels do not suit model.architecture = 'amoebanet-d', .* use multiples of 32"),
        (("batch = 8", "batch_tokens = 8"), r"train\.batch_tokens = 8 counts text, and data\.kind = 'slides'"),
        (('kind = "slides"\nimages = 60\nsize = 32', 'source = "stdlib"\nsequence = 8'),
         "model.architecture = 'resnet' takes images, and data.kind = 'text' gives text"),
    ],
)  # fmt: skip
def test_models_that_do_not_suit_the_data(tmp_path: Path, change: tuple[str, str], message: str | None) -> None:
    text = RUN_FILE.format(folder=tmp_path).replace(*change)
    if "[log]" in text:  # the table of data was put earlier: leave out its old one
        text = text.replace('[log]\nnorm = "group"\n', "")
        text = text[: text.index('[data]\nkind = "slides"\nimages')] + text[text.index("[train]") :]
    path = tmp_path / "run.toml"
    path.write_text(text)
    if message is None:
        load_run(path)
        return
    with pytest.raises(ConfigError, match=message):
        load_run(path)


def call(monkeypatch: pytest.MonkeyPatch, *arguments: object) -> int:
    monkeypatch.setattr(sys, "argv", ["weft", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "200")
    try:
        main()
    except SystemExit as left:
        return int(left.code or 0)
    return 0


def test_commands_of_a_run_of_images(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = f"folder={tmp_path / 'run'}"
    assert call(monkeypatch, "train", run_file, folder, "train.steps=2", BATCH_NORM) == 0
    out = capfd.readouterr().out
    assert "8 images/step = 1 data × 1 shard × 4 micro-batch × 2 accumulation\n" in out
    assert "images/s" in out
    assert "held out" in out
    assert "right (chance is 50.0%)" in out
    assert "verified in float64" in out
    assert call(monkeypatch, "plan", run_file, folder, "--json") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["memory"]["saved_bytes"] > 0
    assert call(monkeypatch, "verify", run_file, "plan.data=2", "--json") == 0
    assert json.loads(capfd.readouterr().out)["passed"]
    refusals = {
        ("generate", tmp_path / "run"): "is of a model of images ('resnet'), which writes no text",
        ("evaluate", tmp_path / "run", "--sequence", "8"): "--kind and --sequence are for text, and",
        ("export", tmp_path / "run", tmp_path / "out", "--adapter"): "has no adapter",
        ("plan", "--model", "resnet50", "--cluster", "h100:1x8", "--tokens-per-step", "1M"): "give --images-per-step",
    }
    for arguments, message in refusals.items():
        assert call(monkeypatch, *arguments) != 0
        assert message in capfd.readouterr().err


@pytest.mark.parametrize("given", [(BATCH_NORM,), ("plan.precision=bf16",)])
def test_a_run_is_measured_as_it_measured_itself_and_written_for_others(
    given: tuple[str, ...],
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = make_run(run_file, f"measured {given[0]}", *given, "train.schedule=constant")
    train_on_ranks(run)
    wanted = events(run.folder, "evaluation")[-1]

    def weft(*arguments: object) -> dict[str, Any]:
        assert call(monkeypatch, *arguments, "--json") == 0
        found: dict[str, Any] = json.loads(capfd.readouterr().out)
        return found

    found = weft("evaluate", run.folder)
    assert found == {
        "loss": pytest.approx(wanted["loss"], rel=1e-5),
        "accuracy": pytest.approx(wanted["accuracy"]),
        "targets": 11,
    }
    assert isinstance(run.data, SlidesConfig)
    folder = slide_folder(Path(run.data.cache), 60, 32, 0)
    assert weft("evaluate", run.folder, "--data", folder)["targets"] == 60
    weft("export", run.folder, tmp_path / "out")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    config = json.loads((tmp_path / "out" / "model.json").read_text())
    model = build(config_from_table(config["model"]))
    assert (config["data"]["kind"], config["model"]["architecture"]) == ("slides", "resnet")
    model.load_state_dict(tensors)  # every name, of torchvision's form
    model.double().eval()
    held_out = prepare_data(run).held_out
    assert held_out is not None
    pixels, labels = held_out.get(np.arange(11))
    loss = F.cross_entropy(model(pixels.double()), labels).item()
    assert loss == pytest.approx(wanted["loss"], rel=3e-2 if "bf16" in given[0] else 1e-4)
    weft("export", run.folder, tmp_path / "narrow", "--dtype", "bf16")
    narrow = load_file(tmp_path / "narrow" / "model.safetensors")
    assert {one.dtype for one in narrow.values()} <= {torch.bfloat16, torch.int64}


def test_without_a_plan_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(RUN_FILE.format(folder=tmp_path).partition("[plan]")[0])
    planned = tmp_path / "planned.toml"
    assert call(monkeypatch, "plan", path, "--write", planned, "--json") == 0
    found: dict[str, Any] = json.loads(capfd.readouterr().out)
    assert found["question"]["images_per_step"] == 8
    assert found["plans"][0]["images_per_second"] > 0
    assert load_run(planned).plan.describe_axes() == found["plans"][0]["axes"]


def test_a_run_of_images_is_written_whole(reference: Run, tmp_path: Path) -> None:
    path = tmp_path / "again.toml"
    path.write_text(reference.to_toml())
    again = load_run(path)
    assert asdict(again.data) == asdict(reference.data)
    assert again.model == reference.model
