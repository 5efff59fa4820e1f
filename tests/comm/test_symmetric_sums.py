"""Sums over symmetric memory: which are taken, what is said without it, and counts, by a stand-in for torch's kernels.

On a GPU, `tests/gpu/test_communication.py` runs the kernels themselves.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parallel_serving_for_tests import tokens_on_ranks

from weft.cluster.small_choice import STRATEGIES, SYMMETRIC, SmallChoice, calls_of_small
from weft.comm import all_reduce, small_sums
from weft.comm.collectives import Axis
from weft.comm.small_measure import measured_choice
from weft.comm.small_sums import with_symmetric_memory
from weft.comm.symmetric_buffer import SymmetricBuffer
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.plan import Plan, Tensor
from weft.serve.engine import EngineOptions
from weft.serve.model.ranks import ServingRanks
from weft.serve.scheduling.request import Request, Sampling

LIMIT_SECONDS = 200.0
CPU = torch.device("cpu")
NUM_BYTES = 4096


class StandIn:
    """What torch's kernels compute, by gathers over a group of the CPU: the sum of all buffers in the order of ranks.

    With `forgets`, the last rank is left out.
    """

    def __init__(self, group: Any, forgets: bool = False) -> None:
        self.group, self.forgets = group, forgets
        self.calls: list[str] = []

    def _summed(self, own: torch.Tensor) -> torch.Tensor:
        every = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(every, own.contiguous(), group=self.group)
        total = every[0].clone()
        for one in every[1 : len(every) - self.forgets]:
            total.add_(one)
        return total

    def one_shot_all_reduce_copy_out(
        self, own: torch.Tensor, given: torch.Tensor, operation: str, name: str, out: torch.Tensor
    ) -> None:
        assert (operation, name, own.shape, out.shape) == ("sum", "group", given.shape, given.shape)
        self.calls.append("one")
        own.copy_(given)
        out.copy_(self._summed(own))

    def two_shot_all_reduce_out(self, own: torch.Tensor, operation: str, name: str, out: torch.Tensor) -> None:
        assert (operation, name, own.shape) == ("sum", "group", out.shape)
        self.calls.append("two")
        out.copy_(self._summed(own))

    def two_shot_all_reduce_(self, own: torch.Tensor, operation: str, name: str) -> None:
        self.calls.append("two in place")
        own.copy_(self._summed(own))


def with_stand_in(axis: Axis, forgets: bool = False) -> tuple[Axis, StandIn]:
    kernels = StandIn(axis.group, forgets)
    buffer = SymmetricBuffer(torch.zeros(NUM_BYTES, dtype=torch.uint8), "group", axis.degree, kernels)
    return replace(axis, symmetric=buffer), kernels


def test_what_is_taken_follows_from_dtype_size_and_place() -> None:
    buffer = SymmetricBuffer(torch.zeros(NUM_BYTES, dtype=torch.uint8), "group", 2, None)
    whole = torch.zeros(2048)
    for tensor, taken in (
        (whole[:1], True),
        (whole[:1024], True),
        (whole[:1025], False),  # larger than the buffer
        (whole[4:8], True),
        (whole[1:5], False),  # begins between multiples of 16 bytes
        (whole[:0], False),
        (whole[:64].view(8, 8).t(), False),
        (torch.zeros(6, dtype=torch.bfloat16), True),
        (torch.zeros(3, dtype=torch.bfloat16), False),  # no whole 4 bytes
        (torch.zeros(8, dtype=torch.float16), False),
        (torch.zeros(8, dtype=torch.float64), False),
        (torch.zeros(8, device="meta"), False),
    ):
        assert buffer.takes(tensor) is taken, (tensor.shape, tensor.dtype)
    assert SYMMETRIC == ("symmetric_one_shot", "symmetric_two_shot")
    assert [calls_of_small(one, 96, 4) for one in SYMMETRIC] == 2 * [[("all_reduce", 96)]]


@pytest.mark.processes
@pytest.mark.parametrize("degree", [2, 3])
def test_sums_have_the_bits_of_one_shot_and_are_counted(degree: int) -> None:
    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh = Mesh(Plan(tensor=Tensor(degree)))
        axis, kernels = with_stand_in(mesh["x"])
        generator = torch.Generator().manual_seed(index)
        wrong, counts = [], {}
        for strategy in SYMMETRIC:
            mesh.ledger.clear()
            for numel in (1, 7, 64, 1024, 1025):
                for dtype in (torch.float32, torch.bfloat16, torch.float64):
                    given = torch.randn(numel, generator=generator).to(dtype)
                    found, twin = given.clone(), given.clone()
                    all_reduce(found, replace(axis, small=SmallChoice.always(strategy))).wait()
                    quiet = replace(axis, small=SmallChoice.always("one_shot"), name="twin")
                    all_reduce(twin, quiet).wait()
                    taken = axis.symmetric is not None and axis.symmetric.takes(given)
                    if (taken and not torch.equal(found, twin)) or not torch.allclose(found.float(), twin.float()):
                        wrong.append((strategy, numel, str(dtype)))
            counts[strategy] = sum(mesh.ledger.entries()["x", "all_reduce"].sizes.values())
        largest = torch.tensor([float(index)])
        all_reduce(largest, replace(axis, small=SmallChoice.always("symmetric_one_shot")), "max").wait()  # no sum
        table = measured_choice(axis, CPU, (256, 1024))
        lost, _ = with_stand_in(mesh["x"], forgets=True)
        spoiled = torch.ones(4)
        all_reduce(spoiled, replace(lost, small=SmallChoice.always("symmetric_two_shot"))).wait()
        return wrong, counts, float(largest), kernels.calls, list(table.strategies), float(spoiled[0])

    results = run_local(rank, degree, LIMIT_SECONDS)
    two = "two" if degree == 2 else "two in place"
    for wrong, counts, largest, calls, strategies, spoiled in results:
        assert wrong == []
        assert counts == dict.fromkeys(SYMMETRIC, 15)  # also those that are the library's
        assert largest == degree - 1
        assert calls[:12] == 6 * ["one"] + 6 * [two]  # float32 but 1025; bfloat16 but 1, 7 and 1025
        assert {"one", two} == set(calls[12:])  # measured too
        assert set(strategies) <= set(STRATEGIES)
        assert spoiled == degree - 1  # the negative control: a rank that is left out is noticed


@pytest.mark.processes
def test_without_symmetric_memory_the_library_adds_up_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request("one", (1, 2, 3), 4, Sampling(temperature=0.0))

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        mesh, said = Mesh(Plan(tensor=Tensor(2))), list[str]()
        ranks = ServingRanks(mesh, "symmetric_one_shot", say=said.append)
        tokens = tokens_on_ranks("llama", mesh, [request], EngineOptions(block_size=4, num_blocks=12), ranks=ranks)
        operations = sorted({key[1] for key in mesh.ledger.entries() if key[0] == "x"})
        ServingRanks(mesh, "measured", say=said.append)
        with pytest.MonkeyPatch.context() as patch:  # as on a GPU where one rank cannot have it
            patch.setattr(small_sums, "_reason_without", lambda axis, device: None)
            kernels = SymmetricBuffer(torch.zeros(64, dtype=torch.uint8), "group", 2, None)

            def rendezvous(axis: Axis, device: torch.device) -> SymmetricBuffer:
                if index == 1:
                    raise RuntimeError("peers cannot read\nmore")
                return kernels

            patch.setattr(small_sums, "_rendezvous", rendezvous)
            axis, reason = with_symmetric_memory(mesh["x"], CPU)
        several = replace(mesh["x"], levels=(mesh["x"], mesh["x"]))
        of_nodes = with_symmetric_memory(several, torch.device("cuda"))[1]
        return said, operations, axis.symmetric is None, reason, of_nodes, tokens and tokens["tokens"]

    results = run_local(rank, 2, LIMIT_SECONDS)
    for index, (said, operations, has_none, reason, of_nodes, _) in enumerate(results):
        words = "these ranks compute on cpu, and it is memory of GPUs; the library adds up over x"
        assert said == [f"--sums symmetric-one-shot needs symmetric memory: {words}"]
        assert operations == ["all_gather", "all_reduce"]  # the gather is of logits
        assert has_none
        given = "torch does not give it (peers cannot read)", "torch does not give it to another rank"
        assert reason == given[1 - index]
        assert of_nodes == "the ranks that add up are on several nodes"
    assert len(results[0][-1]["one"]) == 4


@pytest.mark.processes
def test_a_model_is_served_over_symmetric_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(str(i), (1 + i, 2, 3), 5, Sampling(temperature=0.0)) for i in range(3)]
    options = EngineOptions(block_size=4, num_blocks=20, token_budget=12, max_running=4, dtype=torch.float32)
    made: list[StandIn] = []

    def stand_in(axis: Axis, device: torch.device) -> tuple[Axis, None]:
        found, kernels = with_stand_in(axis)
        made.append(kernels)
        return found, None

    monkeypatch.setattr("weft.serve.model.ranks.with_symmetric_memory", stand_in)

    def rank(index: int) -> Any:
        torch.set_num_threads(1)
        found = []
        for sums in ("one_shot", *SYMMETRIC):
            mesh = Mesh(Plan(tensor=Tensor(2)))
            ranks = ServingRanks(mesh, sums)  # type: ignore[arg-type]
            tokens = tokens_on_ranks("llama", mesh, requests, options, ranks=ranks)
            found.append(tokens and (tokens["tokens"], tokens["embedding"]))
        return found, [set(one.calls) for one in made] == [{"one"}, {"two"}]

    for found, has_called in run_local(rank, 2, LIMIT_SECONDS):
        assert has_called
        assert found[0] == found[1] == found[2]
