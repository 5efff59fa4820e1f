"""What norms save on a rank is measured; where it cannot be, predictions say what they assume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from nets_for_tests import chain, mlp_block
from runs_for_tests import write_run_file
from torch import Tensor, nn

from weft.cluster.hardware import load
from weft.parallel.apply import assumptions
from weft.parallel.tensor import norm as norm_module
from weft.parallel.tensor.norm import NormMemory
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan
from weft.planner.predict import predict
from weft.profiling import Profile, profile
from weft.run_file import load_run
from weft.step.examples import _profile_of

WIDTH, ROWS = 8, 6
X, DATA = Plan(tensor=TensorPlan(x=2)), Plan(data=2)


class FolioNorm(nn.LayerNorm):
    """A norm that takes values of four dims only."""

    def forward(self, value: Tensor) -> Tensor:
        if value.dim() != 4:
            raise ValueError(f"folios have 4 dims\nnot {value.dim()}")
        return super().forward(value)


def profile_of(norm: type[nn.LayerNorm]) -> Profile:
    model = chain([mlp_block(WIDTH, norm) for _ in range(3)], head=nn.Linear(WIDTH, 4))
    return profile(model, lambda: (torch.zeros(1, 1, ROWS, WIDTH),), lambda out: out.sum())


def test_a_norm_that_cannot_be_run_on_rows_is_named_with_the_reason() -> None:
    (text,) = assumptions(profile_of(FolioNorm), X)
    # The input of the first block needs no gradient.
    assert text.startswith("norm 'blocks.1.norm' and 1 more could not be run on some rows alone")
    assert "(ValueError: folios have 4 dims)" in text
    assert "in proportion" in text


def test_nothing_is_assumed_of_norms_that_are_measured_or_not_split() -> None:
    assert assumptions(profile_of(nn.LayerNorm), X) == ()
    assert assumptions(profile_of(FolioNorm), DATA) == ()


def test_a_norm_that_cannot_be_run_on_rows_counts_as_in_the_profile() -> None:
    sizes = {}
    for norm in (nn.LayerNorm, FolioNorm):
        memory = NormMemory(profile_of(norm), torch.float32, is_split=False)
        ((name, layer),) = memory.norms_of("blocks.1")
        assert name == "blocks.1.norm"
        sizes[norm] = memory.whole_bytes(name, layer, is_local=True)
    assert sizes[FolioNorm] == sizes[nn.LayerNorm] == 4 * ROWS * (WIDTH + 2)  # its input, mean and deviation


def test_a_prediction_tells_what_it_assumes_of_norms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> str:
        return "ValueError: no rows"

    file, gpus = write_run_file(tmp_path), load("h200:1x2")
    settings = ["plan.tensor.x=2", "train.compile=false"]
    assert not predict(load_run(file, settings), gpus).assumptions
    monkeypatch.setattr(norm_module, "_saved_per_row", fail)
    _profile_of.cache_clear()
    (text,) = predict(load_run(file, settings), gpus).to_json()["assumptions"]
    _profile_of.cache_clear()
    assert "ValueError: no rows" in text
