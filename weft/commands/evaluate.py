"""Measures a trained model on data, in this process: mean loss and accuracy of its targets, of text also perplexity."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.commands.image_runs import evaluate_images
from weft.data.config import DataConfig
from weft.errors import ConfigError
from weft.mesh import Mesh
from weft.models.hf_config import CONFIG_FILE
from weft.run_file import Run, run_from_tables
from weft.saved_run import open_checkpoint, places_of, refuse_changed_data, saved_data, saved_samples
from weft.schema import parse_toml, to_table
from weft.step.objective import CLASSIFICATION
from weft.step.train_step import evaluate
from weft.train.batches import prepare_data
from weft.train.setup import device_type, first_model, keep_documents_apart

ROWS = 4  # sequences that are computed at once
_OF_TOKENS = ("tokenizer", "end_token", "add_special_tokens", "template")
_OF_KIND = ("kind", "text_field", "documents")  # keys of [data] that are not shared by all kinds of text


def evaluate_folder(
    folder: Path, source: Path | None, kind: str | None = None, sequence: int | None = None
) -> dict[str, Any]:
    """Returns the measures of a run, a checkpoint or a Hugging Face folder on all of `source`; without one, on the
    samples that the run itself has held out and evaluates on.

    The data is read as the run read its own, unless `kind` or `sequence` say otherwise.
    """
    if not (folder / CONFIG_FILE).is_file():
        checkpoint = open_checkpoint(folder)
        if not isinstance(saved_samples(checkpoint), DataConfig):
            if kind is not None or sequence is not None:
                raise ConfigError(f"--kind and --sequence are for text, and {folder} is of images; leave them out")
            return evaluate_images(checkpoint, source)
    run = _run(folder, source, kind, sequence)
    device = torch.device(device_type(run))
    mesh = Mesh(run.plan, device)
    data = prepare_data(run)
    samples, number = data.train, len(data.train)
    if source is None:
        if data.held_out is None:
            raise ConfigError(f"{folder} has held out nothing of its data; give --data")
        refuse_changed_data(open_checkpoint(folder), data.fingerprint)
        samples, number = data.held_out, min(run.train.evaluate_sequences, len(data.held_out))
    rows = [np.arange(begin, min(begin + ROWS, number)) for begin in range(0, number, ROWS)]
    batches = [tuple(tensor.to(device) for tensor in samples.get(row)) for row in rows]
    model = first_model(run, mesh)
    keep_documents_apart(run, model, mesh)
    loss, accuracy = evaluate(model, batches, mesh, CLASSIFICATION).tolist()
    num_targets = sum(int(CLASSIFICATION.count(batch)) for batch in batches)
    perplexity = math.exp(loss) if loss < math.log(torch.finfo(torch.float64).max) else math.inf
    return {"loss": loss, "perplexity": perplexity, "accuracy": accuracy, "targets": num_targets}


def in_words(found: Mapping[str, Any]) -> str:
    """Returns what `evaluate_folder` found as a line."""
    words = ", ".join(f"{key} {value:.4f}" for key, value in found.items() if key != "targets")
    return f"{words} over {found['targets']:,} targets"


def _run(folder: Path, source: Path | None, kind: str | None, sequence: int | None) -> Run:
    """Returns a run of one rank that starts from the folder, with `source` or else the folder's own data."""
    data: dict[str, Any] = {}
    train: dict[str, Any] = {"steps": 1, "batch": ROWS}
    if not (folder / CONFIG_FILE).is_file():
        checkpoint = open_checkpoint(folder)
        data = {**to_table(saved_data(checkpoint)), **places_of(checkpoint)}
        saved = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("train")
        if isinstance(saved, dict) and "evaluate_sequences" in saved:
            train["evaluate_sequences"] = saved["evaluate_sequences"]
        data = {key: value for key, value in data.items() if key not in _OF_TOKENS}  # `model.from` gives them
    if source is None and not data:
        raise ConfigError(f"{folder} does not say what it was trained on; give --data")
    if source is None and (kind is not None or sequence is not None):
        raise ConfigError("--kind and --sequence say how --data is read; give it too, or leave them out")
    if kind is not None:
        data = {key: value for key, value in data.items() if key not in _OF_KIND} | {"kind": kind}
    if sequence is not None:
        data["sequence"] = sequence
    if "sequence" not in data:
        raise ConfigError(f"{folder} does not say how long sequences are; give --sequence")
    if data.get("kind") == "preference":
        raise ConfigError("preferences are measured beside their reference, in training only; use --kind chat or text")
    tables = {
        "model": {"from": str(folder)},
        "data": data if source is None else {**data, "source": str(source), "held_out": 0.0},
        "train": train,
    }
    return run_from_tables(tables, {}, "evaluation")
