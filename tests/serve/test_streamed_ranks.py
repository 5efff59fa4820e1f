"""Weights in host memory on several ranks: the same bits, shares of blocks that are gathered in order, and counted."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from parallel_serving_for_tests import tokens_on_ranks, whole_model
from serving_for_tests import CONFIGS, GREEDY

from weft.comm import Ledger
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Pipe, Plan, Tensor
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.streamed_model import all_block_bytes, pass_calls
from weft.serve.parallel.rank_part import RankPlace
from weft.serve.refusals import ServingCase, refuse
from weft.serve.scheduling.request import Request
from weft.serve.weights.packed_linear import pack_model
from weft.serve.weights.streamed_weights import ALIGNMENT, BlockLayout, StreamedWeights
from weft.serve.weights.weight_formats import FORMATS

LIMIT_SECONDS = 300.0
OPTIONS = EngineOptions(block_size=4, num_blocks=30, token_budget=8, max_running=4)
REQUESTS = [Request(str(i), (7 * i + 1, 5, 3, i), 5 + i, GREEDY) for i in range(5)]


def blocks_of(number: int) -> list[torch.nn.Module]:
    torch.manual_seed(3)
    return [torch.nn.Sequential(torch.nn.Linear(24, 24 + one), torch.nn.LayerNorm(7)) for one in range(number)]


def test_tensors_of_a_block_are_views_of_its_bytes() -> None:
    block = blocks_of(3)[2]
    block.register_parameter("view", torch.nn.Parameter(block[0].weight[3:5]))  # of the same memory
    for num_readers in (1, 2, 3):
        layout = BlockLayout([block], num_readers)
        assert layout.num_bytes == num_readers * layout.share_bytes
        assert layout.num_bytes % (num_readers * ALIGNMENT) == 0
        whole = torch.zeros(layout.num_bytes, dtype=torch.uint8)
        layout.copy_to(whole)
        expected = {name: one.detach().clone() for name, one in block.named_parameters()}
        layout.move_tensors(whole)
        for name, one in block.named_parameters():
            assert torch.equal(one, expected[name]), (num_readers, name)
            assert one.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr()
        assert block.view.data_ptr() == block[0].weight[3].data_ptr()  # they still share memory


@pytest.mark.processes
def test_readers_have_a_share_each_and_gather_blocks_in_one_order() -> None:
    num_blocks, ahead, num_passes = 5, 1, 3
    expected = [[one.detach() for one in block.parameters()] for block in blocks_of(num_blocks)]

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh = Mesh(Plan(data=3))
        blocks = blocks_of(num_blocks)
        with torch.no_grad():
            streamed = StreamedWeights([(one,) for one in blocks], torch.device("cpu"), ahead, mesh["data"])
        mesh.ledger.clear()
        wrong = []
        for number in range(num_passes):
            if (index + number) % 3 == 0:  # this rank has nothing to compute
                streamed.pass_by()
                continue
            for one, block in enumerate(blocks):
                streamed.need(one)
                found = [bool(torch.equal(*pair)) for pair in zip(block.parameters(), expected[one], strict=True)]
                wrong += [] if all(found) else [(number, one)]
                streamed.done(one)
        streamed.need(0)  # the gathers that are under way end before the group does
        streamed.need(1)
        sizes = mesh.ledger.entries()["data", "all_gather"].sizes
        return wrong, dict(sizes), [len(one) for one in streamed.home], list(streamed.block_bytes)

    for wrong, sizes, shares, block_bytes in run_local(rank, 3, LIMIT_SECONDS):
        assert wrong == []
        assert shares == [size // 3 for size in block_bytes]
        calls = list(pass_calls(block_bytes, 3, ahead))
        assert {size: num_passes * calls.count((("data", "all_gather"), size)) for _, size in calls} == {
            int(size): calls for size, calls in sizes.items()
        }


CASES = [  # a model, the plan, and how many blocks stay on the device
    ("llama-deep", Plan(tensor=Tensor(2)), 0),
    ("qwen2-deep", Plan(data=2), 0),
    ("qwen2-deep", Plan(data=2), 1),
    ("qwen3-deep", Plan(pipe=Pipe(2)), 0),
    ("gpt2-deep", Plan(tensor=Tensor(1, 2)), 0),
    ("mixtral", Plan(expert=2), 0),
    ("llama-deep", Plan(tensor=Tensor(2)), 1),
    ("gpt2-deep", Plan(pipe=Pipe(2)), 1),
]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("cases", "num_ranks"),
    [
        (CASES[:3], 2),
        pytest.param(CASES[3:], 2, marks=pytest.mark.soak),
        pytest.param([("llama-deep", Plan(data=2, tensor=Tensor(2)), 0)], 4, marks=pytest.mark.soak),
    ],
)
def test_several_ranks_give_the_same_with_streamed_weights(cases: list[tuple[str, Plan, int]], num_ranks: int) -> None:
    def rank(_: int) -> Any:
        torch.set_num_threads(1)
        found = []
        for name, plan, num_resident in cases:
            of_plan = []
            for ahead in (0, 1):
                mesh = Mesh(plan)
                ranks = ServingRanks(mesh, streams=ahead > 0)
                options = replace(OPTIONS, stream_weights=ahead, resident_blocks=ahead * num_resident)
                of_plan.append((tokens_on_ranks(name, mesh, REQUESTS, options, ranks=ranks), gathered(mesh.ledger)))
            found.append(of_plan)
        return found

    results = run_local(rank, num_ranks, LIMIT_SECONDS)
    for index, (name, plan, num_resident) in enumerate(cases):
        (plain, none), (streamed, counted) = results[0][index]
        assert streamed == plain, (name, plan.describe_axes())
        assert none == {}
        assert results[1][index][1][1] == counted  # of the other rank: equal calls
        if plan.data == 1:
            assert counted == {}  # each rank reads only its own slices
            continue
        place = RankPlace(plan, dict.fromkeys(plan.degrees, 0))
        sizes = all_block_bytes(CONFIGS[name], place, torch.float64, None)[num_resident:]  # all blocks are equal
        one_pass = list(pass_calls(sizes, plan.data, 1))
        assert len(one_pass) == (2 if num_resident else 4)  # one of three streamed blocks keeps its place
        calls = {int(size): number for size, number in counted.items()}
        num_passes, first = divmod(sum(calls.values()) - 2, len(one_pass))  # two blocks when the engine is made
        assert first == 0
        assert num_passes > len(REQUESTS)
        assert len({size for _, size in one_pass}) == 1
        assert calls == {one_pass[0][1]: num_passes * len(one_pass) + 2}


def gathered(ledger: Ledger) -> dict[int, int]:
    """Calls by bytes of all-gathers over replicas."""
    found = ledger.entries().get(("data", "all_gather"))
    return {} if found is None else {int(size): calls for size, calls in found.sizes.items()}


@pytest.mark.processes
def test_a_share_that_is_not_given_is_noticed() -> None:
    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh, blocks = Mesh(Plan(data=2)), blocks_of(3)
        with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
            if index == 1:  # gives something else than its share
                patch.setattr(BlockLayout, "copy_to", lambda self, block: block.zero_())
            streamed = StreamedWeights([(one,) for one in blocks], torch.device("cpu"), 2, mesh["data"])
        for one in range(3):
            streamed.need(one)
        expected = blocks_of(3)
        return [torch.equal(one[0].weight, other[0].weight) for one, other in zip(blocks, expected, strict=True)]

    assert run_local(rank, 2, LIMIT_SECONDS) == [[False] * 3] * 2


@pytest.mark.parametrize("kind", [None, "int4", "fp8"])
@pytest.mark.parametrize("name", ["llama-deep", "mixtral"])
def test_bytes_of_blocks_follow_from_the_config(name: str, kind: str | None) -> None:
    format, plan = None if kind is None else FORMATS[kind], Plan()
    model = whole_model(name)
    if format is not None:
        pack_model(model, format)
    engine = Engine(model, replace(OPTIONS, stream_weights=1))
    assert engine._part.streamed is not None
    place = RankPlace(plan, dict.fromkeys(plan.degrees, 0))
    predicted = all_block_bytes(CONFIGS[name], place, torch.float64, format)
    assert predicted == engine._part.streamed.block_bytes
    assert list(pass_calls(predicted, 1, 1)) == []  # one rank gathers nothing
    assert list(pass_calls(predicted, 2, 3)) == []  # all blocks have room


def test_replicas_of_stages_are_refused() -> None:
    given = {"stream_weights": 1}
    refuse(ServingCase(given, Plan(data=2, tensor=Tensor(2))))
    refuse(ServingCase(given, Plan(pipe=Pipe(2), tensor=Tensor(2))))
    with pytest.raises(PlanError, match="are in different steps; use one of the two, or leave out --stream-weights"):
        refuse(ServingCase(given, Plan(data=2, pipe=Pipe(2))))
