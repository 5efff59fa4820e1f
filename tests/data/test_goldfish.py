"""Goldfish masks, to the bit of a loop in plain Python, and the same loss under any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import runs_for_tests as runs
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data import goldfish
from weft.data.goldfish import TABLE_SEED, TABLE_SIZE, Goldfish
from weft.errors import ConfigError
from weft.models.loss import IGNORE

pytestmark = pytest.mark.processes

TABLE = torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(TABLE_SEED)).tolist()


def by_hand(targets: list[int], k: int, h: int) -> list[bool]:
    """One target after another, with integers that wrap as 64 bits do."""
    result = []
    for place in range(len(targets)):
        if place < h - 1:
            result.append(False)
            continue
        product = 1
        for target in targets[place - h + 1 : place + 1]:
            product = (product * target + 2**63) % 2**64 - 2**63
        result.append(TABLE[product % TABLE_SIZE] < 1 / k)
    return result


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(0, 128255), st.just(IGNORE), st.just(0)), min_size=1, max_size=60),
    st.sampled_from([3, 4, 128]),
    st.sampled_from([1, 4, 13]),
)
def test_masks_are_those_of_a_loop(targets: list[int], k: int, h: int) -> None:
    assert Goldfish(k, h).left_out(torch.tensor([targets]))[0].tolist() == by_hand(targets, k, h)


GOLDEN = {(3, 1): [0, 1, 4, 6, 7, 8, 11, 12, 14], (4, 4): [7, 8, 9, 10, 11, 12, 14], (3, 13): [12, 13, 14]}
GOLDEN_TABLE = [0.23368388, 0.44126403, 0.7411477]


def test_golden_vectors() -> None:
    targets = torch.tensor([[7, 11, 50256, 3, 99999, 128000, 5, 0, 42, 17, 128255, 77777, 65536, 9, 12]])
    places = {
        (k, h): Goldfish(k, h).left_out(targets)[0].nonzero()[:, 0].tolist() for k, h in ((3, 1), (4, 4), (3, 13))
    }
    assert places == GOLDEN
    assert TABLE[:3] == pytest.approx(GOLDEN_TABLE, abs=1e-7)


def test_a_passage_loses_the_same_targets_everywhere_and_one_in_k() -> None:
    generator = torch.Generator().manual_seed(0)
    targets = torch.randint(1, 50000, (20, 1000), generator=generator)
    targets[1, 300:400] = targets[0, 100:200]
    found = Goldfish(4, 13).left_out(targets)
    assert torch.equal(found[1, 312:400], found[0, 112:200])
    rate, count = float(found[:, 12:].double().mean()), found[:, 12:].numel()
    assert abs(rate - 0.25) < 4 * (0.25 * 0.75 / count) ** 0.5


def test_what_did_not_count_still_does_not() -> None:
    targets = torch.randint(1, 1000, (4, 50), generator=torch.Generator().manual_seed(0))
    targets[:, 20:30] = IGNORE
    changed = Goldfish(3, 2).apply(targets)
    assert bool((changed[:, 20:30] == IGNORE).all())
    assert bool(((changed == targets) | (changed == IGNORE)).all())
    assert int((changed != IGNORE).sum()) < int((targets != IGNORE).sum())
    short = torch.ones(2, 3, dtype=torch.long)
    assert torch.equal(Goldfish(3, 4).apply(short), short)


def test_a_table_of_another_generator_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    targets = torch.randint(1, 1000, (4, 50), generator=torch.Generator().manual_seed(0))
    expected = Goldfish().left_out(targets)
    monkeypatch.setattr(goldfish, "_table", lambda: torch.rand(TABLE_SIZE, generator=torch.Generator().manual_seed(1)))
    assert not torch.equal(Goldfish().left_out(targets), expected)


def test_values_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match=r"goldfish.k = 1 leaves out every target"):
        Goldfish(k=1)
    with pytest.raises(ConfigError, match=r"goldfish.h = 0; a window holds"):
        Goldfish(h=0)


def test_any_layout_takes_the_same_targets(tmp_path: Path) -> None:
    file = runs.write_run_file(tmp_path)
    some = ["train.steps=4", "train.goldfish.k=3", "train.goldfish.h=4", "checkpoint.every=4", "plan.precision=fp64"]
    found = {}
    for name, overrides in {
        "one": [],
        "plain": ["train.goldfish.k=1000000000"],
        "data": ["plan.data=2", "plan.micro_batch=4"],
        "context": ["plan.context=2"],
    }.items():
        run = runs.make_run(file, name, *some, *overrides)
        runs.train_on_ranks(run)
        found[name] = runs.losses(run.folder)
    assert found["data"] == pytest.approx(found["one"], rel=1e-9)
    assert found["context"] == pytest.approx(found["one"], rel=1e-9)
    assert abs(found["plain"][0] - found["one"][0]) > 1e-5
