"""Runs that start from weights: of Hugging Face folders, and of runs and checkpoints under any plan."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from chats_for_tests import EOS, write_tokenizer
from models_for_tests import small_config
from runs_for_tests import Silent, make_run, train_on_ranks, write_run_file
from tokenizers_for_tests import write_family

from weft.checkpoint import Checkpoint, Saver, file_hashes, latest
from weft.checkpoint.folder import step_name
from weft.data.config import ChatConfig, DataConfig
from weft.errors import CheckpointError, WeftError
from weft.launch.environment import RankInfo
from weft.launch.local_ranks import LocalError
from weft.models import build, initialise, save_folder, write_weights
from weft.run_file import Run, load_run
from weft.saved_run import weights_fingerprint
from weft.train import loop, resume
from weft.train.setup import first_values

CONFIG = small_config(architecture="qwen2", vocab_size=260, width=16, inner=24, layers=1, heads=2, keys=2)


def run_from(tmp_path: Path, source: Path, *overrides: str) -> Run:
    """A run whose file says no more of its model than `model.from`."""
    run_file = write_run_file(tmp_path)
    text = run_file.read_text()
    run_file.write_text(f'[model]\nfrom = "{source}"\n' + text[text.index("[data]") :])
    return make_run(run_file, "run", "train.steps=2", "train.warmup_steps=0", "train.batch=4", *overrides)


def test_a_sharded_folder_gives_model_tokenizer_and_weights(tmp_path: Path) -> None:
    model, folder = build(CONFIG), tmp_path / "model"
    initialise(model, seed=5)
    write_weights(folder, CONFIG, model.named_parameters(), max_shard_bytes=8000)
    assert len(list(folder.glob("*.safetensors"))) > 1
    with pytest.raises(WeftError, match=r"model\.from = .* has no tokenizer\.json; give data\.tokenizer"):
        run_from(tmp_path, folder)
    write_tokenizer(folder)
    run = run_from(tmp_path, folder)
    assert run.model == CONFIG
    assert run.tokenizer.end == 257, "as tokenizer_config.json says"
    assert run.tokenizer.end_token == EOS
    assert f'from = "{folder}"' in run.to_toml()
    values = first_values(run)
    assert all(torch.equal(values(name), parameter) for name, parameter in model.named_parameters())
    assert run_from(tmp_path, folder, "data.tokenizer=bytes").tokenizer.vocab_size == 257


def test_bad_folders_are_refused_in_a_line(tmp_path: Path) -> None:
    def refusal(folder: Path) -> str:
        with pytest.raises(WeftError) as found:
            run_from(tmp_path, folder, "data.tokenizer=bytes")
        assert "\n" not in str(found.value)
        return str(found.value)

    good = tmp_path / "good"
    save_folder(good, build(CONFIG))
    config = json.loads((good / "config.json").read_text())
    assert "model.from: '" in refusal(tmp_path / "missing")
    assert "is no folder" in refusal(tmp_path / "missing")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "holds neither config.json (a Hugging Face folder) nor a complete checkpoint" in refusal(empty)
    (empty / "config.json").write_text((good / "config.json").read_text())
    (empty / "pytorch_model.bin").write_text("")
    assert "pytorch_model.bin is pickled and never opened" in refusal(empty)
    (good / "config.json").write_text(json.dumps({**config, "intermediate_size": 25}))
    assert "mlp.down_proj.weight has shape (16, 24), but the config needs (16, 25)" in refusal(good)
    (good / "config.json").write_text(json.dumps({**config, "architectures": ["MambaForCausalLM"]}))
    assert "architectures = ['MambaForCausalLM'] is not supported" in refusal(good)


@pytest.mark.processes
def test_a_run_starts_from_a_checkpoint_of_another_plan_and_keeps_to_it(tmp_path: Path) -> None:
    run_file = write_run_file(tmp_path)
    first = make_run(run_file, "first", "plan.tensor.x=2", "train.steps=3", "train.batch=4", "checkpoint.every=1")
    train_on_ranks(first)
    newest = latest(first.folder / "checkpoints")
    assert newest is not None
    for source in (first.folder, newest):
        run = run_from(tmp_path, source, "plan.shard=2")
        assert run.model == first.model
        values, stored = first_values(run), Checkpoint(newest)
        for entry in stored.entries("parameter"):
            assert torch.equal(values(entry.name), stored.read(entry.name, "parameter"))
    train_on_ranks(run)
    fingerprint = weights_fingerprint(newest, None, tmp_path / "other")
    assert Checkpoint(run.folder / "checkpoints" / "step-00000002").state["source"] == fingerprint
    other = run_from(tmp_path, first.folder / "checkpoints" / "step-00000002", "plan.shard=2", "train.steps=3")
    with pytest.raises((CheckpointError, LocalError), match=r"started from weights [0-9a-f]{12}, now model\.from has"):
        train_on_ranks(other)


def test_a_frozen_run_does_not_ask_the_folder_again(tmp_path: Path) -> None:
    save_folder(tmp_path / "model", build(CONFIG))
    run = run_from(tmp_path, tmp_path / "model", "data.tokenizer=bytes")
    frozen = tmp_path / "job.frozen"
    frozen.write_text(run.to_json())
    (tmp_path / "model" / "config.json").unlink()
    assert load_run(frozen) == run


def test_a_changed_byte_anywhere_in_the_weights_is_noticed_and_nothing_is_hashed_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(CONFIG, vocab_size=70_000)  # two megabytes on both sides of the changed byte
    model = build(config)
    initialise(model, seed=5)
    save_folder(tmp_path / "model", model)
    run = run_from(tmp_path, tmp_path / "model", "data.tokenizer=bytes", "train.steps=1")
    hashed = []

    def hash_file(path: Path) -> str:
        hashed.append(path.name)
        return read_all(path)

    read_all = file_hashes._hash
    monkeypatch.setattr(file_hashes, "_hash", hash_file)
    monkeypatch.setattr(file_hashes, "_NEW_SECONDS", 0.0)

    def start(*overrides: str) -> None:
        file_hashes._known.clear()  # as another process would begin
        again = run_from(tmp_path, tmp_path / "model", "data.tokenizer=bytes", *overrides)
        assert again.folder == run.folder
        loop.train(again, RankInfo(), Silent())

    start("train.steps=1")
    assert hashed == ["model.safetensors"]
    start("train.steps=2")
    assert hashed == ["model.safetensors"]
    weights = tmp_path / "model" / "model.safetensors"
    before, middle = weights.stat(), weights.stat().st_size // 2
    with weights.open("r+b") as file:
        file.seek(middle)
        byte = file.read(1)[0]
        file.seek(middle)
        file.write(bytes([byte ^ 1]))
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (weights.stat().st_size, weights.stat().st_mtime_ns) == (before.st_size, before.st_mtime_ns)
    with pytest.raises(CheckpointError, match=r"started from weights [0-9a-f]{12}, now model\.from has weights"):
        start("train.steps=3")
    with weights.open("r+b") as file:
        file.seek(middle)
        file.write(bytes([byte]))
    start("train.steps=3")  # the same bytes again, at another time
    assert hashed == ["model.safetensors"] * 3


def test_hashes_are_found_without_a_record(tmp_path: Path) -> None:
    weights, empty = tmp_path / "weights", tmp_path / "empty"
    weights.write_bytes(b"w" * 100)
    empty.touch()
    record = tmp_path / "record"
    found = file_hashes.file_hashes([weights, empty], record)
    assert len(set(found)) == 2
    for content in ("", "{", "[1]"):  # cut off, or of another program
        record.write_text(content)
        file_hashes._known.clear()
        assert file_hashes.file_hashes([weights, empty], record) == found
    record.unlink()
    record.mkdir()
    assert file_hashes.file_hashes([weights, empty], record) == found
    weights.write_bytes(b"w" * 99 + b"v")
    assert file_hashes.file_hashes([weights], record) != found[:1]


@pytest.mark.parametrize(("kind", "is_chat"), [(DataConfig, False), (ChatConfig, True)])
def test_a_run_of_an_earlier_weft_is_told_which_keys_bring_its_texts_back(
    kind: type[DataConfig], is_chat: bool, tmp_path: Path
) -> None:
    """It ended texts with a token that no key named, and surrounded them with none."""
    own = write_family(tmp_path / "own", "qwen")
    (tmp_path / "chats").mkdir()
    table = f'kind = "{"chat" if is_chat else "text"}"\nsource = "chats"\nsequence = 8\ntokenizer = "{own}"\n'
    state = {"run": f'folder = "run"\n[data]\n{table}', "data": {"fingerprint": "old"}}
    Saver(tmp_path / "checkpoints", 0, 1, "abcd").save(1, [], state, asynchronous=False)
    checkpoint = Checkpoint(tmp_path / "checkpoints" / step_name(1))
    data: Any = SimpleNamespace(fingerprint="new", contents=None)

    def refused(**more: Any) -> str:
        run: Any = SimpleNamespace(data=kind("chats", 8, tokenizer=str(own), **more))
        with pytest.raises(CheckpointError) as caught:
            resume._refuse_other_data(checkpoint, data, run)
        return str(caught.value)

    words = refused()
    assert "data.end_token = '<|endoftext|>', now None" in words
    assert "data.add_special_tokens = False, now True" in words
    assert ("which no key brings back" in words) == is_chat
    words = refused(end_token="<|endoftext|>", add_special_tokens=False)
    assert "data." not in words
    assert "fingerprint old, now new" in words
