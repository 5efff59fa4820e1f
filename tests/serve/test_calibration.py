"""Texts by which a model is calibrated: what does not go with the model is refused in words, before the long work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from commands_for_tests import Weft
from serving_for_tests import CONTEXT, MODELS, ONE, SIZES, tiny_model

from weft.architectures import RecurrentConfig
from weft.data.tokenizer import ByteTokenizer
from weft.errors import ConfigError, DataError
from weft.models import DecoderConfig, build, initialise, save_folder
from weft.serve.attention.choice import LokiChoice
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.calibration.graph_index import index_model
from weft.serve.calibration.loki_calibration import calibrate
from weft.serve.loading import calibration_texts, load_model
from weft.serve.model.ranks import ServingRanks
from weft.serve.spec import ServingSpec
from weft.serve.weights.weight_formats import FORMATS

COMMANDS = ("calibrate", "index")


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text").write_text("some words, some words, and some more words " * 9)
    return tmp_path / "text"


def refuse(message: str) -> None:
    raise AssertionError(message)


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_recurrent_model_in_fewer_bits_is_refused_before_it_is_read(kind: str, tmp_path: Path, text: Path) -> None:
    model = build(RecurrentConfig(kind, vocab_size=257, hidden_size=12))  # type: ignore[arg-type]
    save_folder(tmp_path / "model", model)  # type: ignore[arg-type]
    for calibration in (None, str(text)):
        spec = ServingSpec(tokenizer="bytes", weights="int4", calibration=calibration)
        with pytest.raises(ConfigError, match=r"is served on one rank, with its weights as they are.*--weights"):
            load_model(tmp_path / "model", spec, say=refuse)
        (tmp_path / "model" / "model.safetensors").unlink(missing_ok=True)


@pytest.mark.parametrize(("name", "size"), [("llama", "intermediate_size"), ("mixtral", "moe_intermediate_size")])
def test_an_odd_number_of_inputs_is_refused_as_without_a_text(name: str, size: str) -> None:
    model = build(replace(MODELS[name], **{size: 23}))  # type: ignore[arg-type]
    initialise(model, 0)
    with pytest.raises(ConfigError, match="keeps two weights in a byte, and a layer has 23 inputs; use int8 or fp8"):
        pack_corrected(model, FORMATS["int4"], [torch.arange(24).view(2, 12)])


def test_tokens_that_the_model_does_not_have_are_refused(tmp_path: Path, text: Path, weft: Weft) -> None:
    words = rf"{text} has token {ord('w')}, and the model has 61 tokens, 0 to 60.*--tokenizer"
    with pytest.raises(DataError, match=words):
        calibration_texts(text, ByteTokenizer(), CONTEXT, 61)
    assert len(calibration_texts(text, ByteTokenizer(), CONTEXT, ord("w") + 1)) > 0
    save_folder(tmp_path / "model", tiny_model("llama"))  # type: ignore[arg-type]
    spec = ServingSpec(tokenizer="bytes", weights="int4", calibration=str(text))
    for ranks in (None, cast(ServingRanks, SimpleNamespace(place=ONE))):
        with pytest.raises(DataError, match=words):
            load_model(tmp_path / "model", spec, say=refuse, ranks=ranks)
    for command in COMMANDS:
        given = ("--tokenizer", "bytes", "--data", text, "--out", tmp_path / "out")
        left = weft(command, tmp_path / "model", *given)
        assert (left.status, left.out) == (2, "")
        assert "and the model has 61 tokens" in left.err
        assert left.err.count("\n") == 1


def test_rows_may_be_longer_than_the_positions_that_a_model_states(tmp_path: Path) -> None:
    """A run may train a model of rotary positions on longer sequences, and serve it so."""
    texts = [torch.arange(2 * (CONTEXT + 8)).view(2, -1) % 61]
    found = calibrate(tiny_model("llama"), texts, LokiChoice(0.25, 0.25, 64, 1024))
    assert bool(found.explained.isfinite().all())
    about = index_model(tiny_model("llama"), 61, texts, tmp_path / "graph", number=8, degree=6, most_rows=40)
    assert about["agreement"] >= 0.999


def test_commands_show_bars_on_stderr_and_print_json_alone(tmp_path: Path, text: Path, weft: Weft) -> None:
    model = build(DecoderConfig(**{**SIZES, "vocab_size": 257}))  # type: ignore[arg-type]
    initialise(model, 0)
    save_folder(tmp_path / "model", model)  # type: ignore[arg-type]
    titles = {"calibrate": ["calibrating"], "index": ["computing the text", "building the graph", "choosing the beam"]}
    for command in COMMANDS:
        given = (tmp_path / "model", "--tokenizer", "bytes", "--data", text, "--json")
        left = weft(command, *given, "--out", tmp_path / command)
        assert left.status == 0, left.err
        assert left.json["file"] == str(tmp_path / command)
        for title in titles[command]:
            assert any(line.startswith(title) and "100 %" in line for line in left.err.splitlines()), left.err


def test_a_place_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path, text: Path, weft: Weft) -> None:
    for command in COMMANDS:
        missing = weft(command, tmp_path / "nothing", "--data", text, "--out", tmp_path / "none" / "file")
        assert (missing.status, missing.out) == (2, "")
        assert f"--out {tmp_path}/none/file lies in a folder that does not exist; create {tmp_path}/none" in missing.err
        folder = weft(command, tmp_path / "nothing", "--data", text, "--out", tmp_path)
        assert folder.status == 2
        assert f"--out {tmp_path} is a folder; give the path of a file" in folder.err
