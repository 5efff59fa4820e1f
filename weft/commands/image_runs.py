"""Runs of images: a trained model is measured on held-out images, and its weights are written for other programs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from weft.checkpoint import Checkpoint
from weft.data.config import Data, DataConfig, ImagesConfig
from weft.errors import ConfigError
from weft.inspection.model_tensors import saved_buffers
from weft.mesh import Mesh
from weft.models.hf import new_folder
from weft.parallel.apply import parallelize
from weft.run_file import Run, run_from_tables
from weft.saved_run import places_of, refuse_changed_data, saved_config, saved_samples
from weft.schema import parse_toml, to_table
from weft.step.task import task_of
from weft.step.train_step import evaluate
from weft.train.batches import prepare_data
from weft.train.setup import build_model, device_type

ROWS = 4  # images that are computed at once
MAX_IMAGES = 1 << 40  # more than a folder has
WEIGHTS, TABLE = "model.safetensors", "model.json"


def evaluate_images(checkpoint: Checkpoint, source: Path | None) -> dict[str, Any]:
    """Returns the mean of each measure that the run logs, on all images of the folder `source`, or on those that the
    run itself has held out and evaluates on. They are computed in the run's precision.
    """
    run = _run(checkpoint, source)
    mesh = Mesh(run.plan, torch.device(device_type(run)))
    data = prepare_data(run)
    if source is not None:
        data = replace(data, held_out=data.train)
    else:
        refuse_changed_data(checkpoint, data.fingerprint)
    if data.held_out is None:
        raise ConfigError(f"{checkpoint.path} has held out nothing of its data; give --data")
    batches = data.evaluation_batches(run, mesh["batch"], mesh.device)
    model = build_model(run)
    with torch.no_grad():
        for name, buffer in saved_buffers(model):
            buffer.copy_(checkpoint.read(name, "buffer"))
    model = parallelize(model, run.plan, mesh, lambda name: checkpoint.read(name, "parameter"))
    objective = task_of(run).objective
    means = evaluate(model, batches, mesh, objective).flatten().tolist()
    num_targets = sum(int(objective.count(batch)) for batch in batches)
    return {**dict(zip(objective.measures, means, strict=True)), "targets": num_targets}


def export_images(
    checkpoint: Checkpoint, target: Path, dtype: torch.dtype | None, progress: Callable[[int, int], None] | None
) -> str:
    """Write the parameters and buffers of a model of images as one safetensors file, and its tables [model] and [data]
    as JSON. Returns the call that loads the weights. The folder appears when it is complete.
    """
    config, data = saved_config(checkpoint), saved_samples(checkpoint)
    entries = [(kind, entry.name) for kind in ("parameter", "buffer") for entry in checkpoint.entries(kind)]
    tensors = {}
    for done, (kind, name) in enumerate(entries, 1):
        tensor = checkpoint.read(name, kind)
        keeps = dtype is None or not tensor.is_floating_point()
        tensors[name] = (tensor if keeps else tensor.to(dtype)).contiguous()
        if progress is not None:
            progress(done, len(entries))
    table = {"model": to_table(config), "data": to_table(data)}
    with new_folder(target) as partial:
        save_file(tensors, partial / WEIGHTS, metadata={"format": "pt"})
        (partial / TABLE).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return f"safetensors.torch.load_file('{target / WEIGHTS}')"


def _run(checkpoint: Checkpoint, source: Path | None) -> Run:
    """Returns a run of one rank on the held-out images of a checkpoint's run, or on a folder of images."""
    saved = parse_toml(checkpoint.stated("run", str), str(checkpoint.path))
    samples = saved_samples(checkpoint)
    data = {**to_table(samples), **places_of(checkpoint)} if source is None else _folder(samples, source)
    train = _part(saved, "train", ("evaluate_sequences",)) if source is None else {"evaluate_sequences": MAX_IMAGES}
    tables = {
        "model": to_table(saved_config(checkpoint)),
        "data": data,
        "train": {"steps": 1, "batch": ROWS, **train},
        "plan": {"micro_batch": ROWS, **_part(saved, "plan", ("precision",))},
    }
    return run_from_tables(tables, {}, "evaluation")


def _part(saved: Mapping[str, Any], table: str, keys: tuple[str, ...]) -> dict[str, Any]:
    found = saved.get(table)
    return {key: found[key] for key in keys if key in found} if isinstance(found, dict) else {}


def _folder(samples: Data, source: Path) -> dict[str, Any]:
    """Returns the table [data] of a folder of images like a run's own. None of them is held out."""
    assert not isinstance(samples, DataConfig)
    height, width, _ = samples.shape(1)
    more = {"level": samples.level, "on_bad": samples.on_bad} if isinstance(samples, ImagesConfig) else {}
    table = {"kind": "images", "source": str(source), "height": height, "width": width, "held_out": 0.0}
    return {**table, **more}
