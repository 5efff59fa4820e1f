"""Small all-reduces: every strategy is the sum at every size, and the ledger counts the stated calls."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import tokens_on_ranks, whole_model
from serving_for_tests import GREEDY, MODELS, serve_all, tokens_of

from weft.cluster.small_choice import STRATEGIES, SYMMETRIC, SmallChoice, calls_of_small, padded_to_parts
from weft.comm import all_reduce
from weft.comm.small_measure import fastest, measured_choice
from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan, Tensor
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.traffic import ServedSizes, step_calls
from weft.serve.scheduling.request import Request
from weft.serve.spec import OPTIONS, ServingSpec, option_of

NUMELS = (1, 2, 3, 5, 8, 17, 64, 1000, 4097)
DTYPES = (torch.float64, torch.float32, torch.bfloat16)
NUM_REPEATED = 200
BY_CALLS = tuple(one for one in STRATEGIES if one not in SYMMETRIC)  # the others are in test_symmetric_sums.py


def value(rank: int, numel: int, dtype: torch.dtype, repeat: int = 0) -> torch.Tensor:
    """Whole numbers, whose sums are exact in every dtype here."""
    return ((torch.arange(numel) * (rank + 2) + repeat) % 13 - 6).to(dtype)


def test_a_choice_is_a_function_of_bytes_and_the_library_is_kept_if_others_gain_little() -> None:
    choice = SmallChoice((256, 1024), ("one_shot", "two_shot"))
    assert [choice.strategy(size) for size in (1, 256, 257, 1024, 1025)] == [
        "one_shot", "one_shot", "two_shot", "two_shot", "library",
    ]  # fmt: skip
    assert fastest({"library": 1.0, "one_shot": 0.94, "two_shot": 0.96}) == "one_shot"
    assert fastest({"library": 1.0, "one_shot": 0.96, "two_shot": 0.99}) == "library"
    assert fastest({"library": 1.0, "one_shot": 0.9, "two_shot": 0.5}) == "two_shot"
    assert fastest({"library": 1.0, "one_shot": 0.9, "symmetric_one_shot": 0.2}) == "symmetric_one_shot"
    assert [padded_to_parts(size, 3) for size in (1, 48, 49)] == [48, 48, 96]
    choices = option_of(OPTIONS["sums"]).choices
    assert [one.replace("-", "_") for one in choices] == [*STRATEGIES, "measured"]
    with pytest.raises(ConfigError, match="--sums tree is unknown; give library, one-shot, two-shot, symmetric-one-sh"):
        ServingSpec(sums="tree")


@pytest.mark.processes
def test_every_strategy_is_the_sum_and_is_counted_as_stated() -> None:
    degree = 3

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh = Mesh(Plan(tensor=Tensor(degree)))
        wrong, counts = [], {}
        for strategy in BY_CALLS:
            axis = replace(mesh["x"], small=SmallChoice.always(strategy))
            mesh.ledger.clear()
            for numel in NUMELS:
                for dtype in DTYPES:
                    tensor = value(index, numel, dtype)
                    all_reduce(tensor, axis).wait()
                    expected = sum(value(one, numel, dtype) for one in range(degree))
                    if not torch.equal(tensor, expected):
                        wrong.append((strategy, numel, str(dtype)))
            counts[strategy] = {key[1]: dict(one.sizes) for key, one in mesh.ledger.entries().items()}
            for repeat in range(NUM_REPEATED):  # results of one call are not those of another
                tensor = value(index, 5, torch.float32, repeat)
                all_reduce(tensor, axis).wait()
                if not torch.equal(tensor, sum(value(one, 5, torch.float32, repeat) for one in range(degree))):
                    wrong.append((strategy, "repeat", repeat))
            largest = torch.tensor([float(index)])
            all_reduce(largest, axis, "max").wait()  # no sum: the library's
            if float(largest) != degree - 1:
                wrong.append((strategy, "max"))
        mesh.ledger.clear()
        table = measured_choice(mesh["x"], torch.device("cpu"), (256, 4096))
        return wrong, counts, list(table.strategies), len(mesh.ledger.entries())

    results = run_local(rank, degree, 200.0)
    for wrong, counts, strategies, num_counted in results:
        assert wrong == []
        assert strategies == results[0][2]  # all ranks choose alike
        assert num_counted == 0
        for strategy in BY_CALLS:
            stated: dict[str, Counter[int]] = {}
            for numel in NUMELS:
                for dtype in DTYPES:
                    for operation, size in calls_of_small(strategy, numel * dtype.itemsize, degree):
                        stated.setdefault(operation, Counter())[size] += 1
            assert {name: dict(one) for name, one in stated.items()} == {
                name: {int(size): calls for size, calls in one.items()} for name, one in counts[strategy].items()
            }


@pytest.mark.processes
def test_served_tokens_and_calls_are_as_stated_with_any_sums() -> None:
    plan, name = Plan(tensor=Tensor(2)), "llama"
    requests = [Request(str(i), tuple(range(i, i + 5)), 6, GREEDY) for i in range(3)]
    options = EngineOptions(block_size=4, num_blocks=12, token_budget=12, max_running=4)

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        found = []
        for sums in ("one_shot", "two_shot", "measured"):
            mesh = Mesh(plan)
            ranks = ServingRanks(mesh, sums)  # type: ignore[arg-type]
            tokens = tokens_on_ranks(name, mesh, requests, options, ranks=ranks)
            found.append((tokens, sorted({key[1] for key in mesh.ledger.entries() if key[0] == "x"})))
        return found

    expected = tokens_of(serve_all(Engine(whole_model(name), options), requests))
    results = run_local(rank, 2, 300.0)
    operations = [one for _, one in results[0]]
    assert operations[:2] == [["all_gather"], ["all_gather", "reduce_scatter"]]
    for tokens, _ in results[0]:
        assert tokens["tokens"] == expected
    calls = list(step_calls(ServedSizes.of(MODELS[name]), plan, 0, 1, 1, 2))
    sums = [size for key, size in calls if key == ("x", "all_reduce")]
    assert len(sums) == 5  # two for each layer, and the embedding
    assert calls_of_small("one_shot", sums[0], 2) == [("all_gather", 2 * sums[0])]
