"""What `weft serve` refuses before a model is read, and what its ranks are told of their host."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_for_tests import OPTIONS, ReachedError
from serving_for_tests import tiny_model, tiny_recurrent

from weft.errors import ConfigError, PlanError
from weft.launch.environment import RankInfo
from weft.models import save_folder
from weft.plan import Plan
from weft.serve.attention.formats import Loki, save_loki
from weft.serve.http import run_server
from weft.serve.http.run_server import refuse_options, run_rank
from weft.serve.loading import load_model


def test_a_rank_knows_how_many_are_on_its_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    given = list[Any]()

    def mesh(*arguments: Any) -> None:
        given.append(arguments)
        raise ReachedError

    monkeypatch.setattr(run_server, "init_process_group", lambda *_: torch.device("cpu"))
    monkeypatch.setattr(run_server, "Mesh", mesh)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    plan, second_host = Plan(data=4), RankInfo(2, 4, 0, 2, 2, "torchrun")
    with pytest.raises(ReachedError):
        run_rank(tmp_path, OPTIONS, plan, second_host, None, lambda about: None, lambda message: None)
    assert given == [(plan, torch.device("cpu"), 2)]


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_what_a_recurrent_model_does_not_have_is_refused_before_it_is_read(kind: str, tmp_path: Path) -> None:
    save_folder(tmp_path, tiny_recurrent(kind, vocab_size=257))
    about = "a recurrent model is served on one rank, with its weights as they are, on the device, and keeps one "
    about += "state for each request and no keys and values; leave out "
    for options, plan, names in (
        ({"weights": "int4"}, Plan(), "--weights"),
        ({"weights": "int4", "calibration": "text"}, Plan(), "--weights and --calibration"),
        ({"merge_adapter": "adapter"}, Plan(), "--merge-adapter"),
        ({"stream_weights": 1, "resident_blocks": 1}, Plan(), "--stream-weights and --resident-blocks"),
        ({}, Plan(data=2), "the plan"),
    ):
        with pytest.raises(ConfigError) as caught:
            refuse_options(tmp_path, replace(OPTIONS, **options), plan)  # type: ignore[arg-type]
        assert str(caught.value) == about + names
    refuse_options(tmp_path, OPTIONS, Plan())
    with pytest.raises(ConfigError) as caught:  # as weft generate --weights int4
        load_model(tmp_path, replace(OPTIONS, weights="int4"))
    assert str(caught.value) == about + "--weights"


def test_axes_are_of_the_weights_that_they_were_made_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_folder(tmp_path, tiny_model("llama"))  # type: ignore[arg-type]
    save_loki(tmp_path / "axes", Loki(torch.eye(4).expand(2, 2, 4, 4), identity="any"))
    monkeypatch.setattr(run_server, "require_run", lambda source: None)
    options = replace(OPTIONS, cache=f"loki={tmp_path / 'axes'}")
    with pytest.raises(ConfigError, match="--follow replaces weights, of which the axes of --cache loki are made; le"):
        refuse_options(tmp_path, replace(options, follow=True), Plan())
    with pytest.raises(PlanError, match=r"cannot compare them with the file of --cache .*loki; leave out plan\.data, "):
        refuse_options(tmp_path, replace(options, stream_weights=1), Plan(data=2))
    refuse_options(tmp_path, replace(options, stream_weights=1), Plan())
    refuse_options(tmp_path, options, Plan(data=2))
    refuse_options(tmp_path, replace(OPTIONS, cache="int4", follow=True), Plan(data=2))
