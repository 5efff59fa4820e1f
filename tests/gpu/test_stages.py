"""Pipelines and tiles on GPU ranks that share a GPU, each beside another axis: equal to the sequential model there.

And the memory of pipelines there: what stages by memory, caps, recompute in a stage and early freeing save.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import tiles_for_tests
from freeing_for_tests import LARGE, LATE, SMALLER
from gpu_for_tests import Case, prove
from pipeline_for_tests import UNet, chain, vectors
from tensor_for_tests import SHIPPED, token_batch

from weft.launch.fork_server import ForkServer
from weft.plan import Context, Memory, Pipe, Plan, Shard, Tensor

DEEP = SHIPPED["two key heads"]


def stages(schedule: str, degree: int = 2, size: int = 16, **plan: object) -> Case:
    options = {"gems": {"batches": 2}, "interleaved": {"chunks": 2}}.get(schedule, {})
    pipe = Pipe(degree, schedule, **options)  # type: ignore[arg-type]
    return Case(chain(8), vectors(size), Plan(**{"pipe": pipe, "micro_batch": 2, **plan}))  # type: ignore[arg-type]


def tiles(name: str) -> Case:
    model, plan = tiles_for_tests.CASES[name]
    return Case(*tiles_for_tests.MODELS[model], plan)


CASES: dict[str, Case] = {
    "pipe 2, gpipe × data 2": stages("gpipe", data=2),
    "pipe 2, 1f1b × shard 2": stages("1f1b", shard=Shard(2, 3)),
    "pipe 4, 1f1b": stages("1f1b", 4),
    "pipe 2, interleaved × data 2": stages("interleaved", data=2),
    "pipe 4, interleaved, few micro-batches": stages("interleaved", 4, size=8),
    "pipe 2, zero-bubble × data 2": stages("zero-bubble", data=2),
    "pipe 2, gems × data 2": stages("gems", data=2),
    "pipe 4, bidirectional": stages("bidirectional", 4),
    "pipe 2, message × data 2": stages("message", data=2),
    "pipe 4, message": stages("message", 4),
    "pipe 3, skip edges": Case(UNet, vectors(16), Plan(pipe=Pipe(3), micro_batch=2)),
    "pipe 4, skip edges": Case(UNet, vectors(16), Plan(pipe=Pipe(4), micro_batch=2)),
    "pipe 2 × x 2, full recompute": Case(
        DEEP, token_batch, Plan(pipe=Pipe(2), tensor=Tensor(2), micro_batch=2, memory=Memory("full"))
    ),
    "pipe 2 × context 2": Case(DEEP, token_batch, Plan(pipe=Pipe(2), context=Context(2), micro_batch=2)),
    "pipe 2 × x 2, recompute of a stage": Case(
        DEEP,
        token_batch,
        Plan(pipe=Pipe(2), tensor=Tensor(2), micro_batch=2, memory=Memory("full", recompute_stages=1)),
    ),
    "pipe 2 × data 2, stages by memory": Case(
        DEEP, token_batch, Plan(data=2, pipe=Pipe(2, balance="memory"), micro_batch=2)
    ),
    "pipe 3, 2 in flight": Case(chain(8), vectors(16), Plan(pipe=Pipe(3, in_flight=2), micro_batch=1)),
    "pipe 2, interleaved, 4 in flight": Case(
        chain(8), vectors(16), Plan(pipe=Pipe(2, "interleaved", chunks=2, in_flight=4), micro_batch=2)
    ),
    "pipe 3, results sent one by one": Case(chain(8), vectors(16), Plan(pipe=Pipe(3, "gpipe"), micro_batch=1)),
    "tiles 2 × 2, gather": tiles("2 × 2"),
    "tiles 2 × 2, batch": tiles("batch"),
    "tiles 2 × 2, until": tiles("until"),
    "tiles 2 × data 2": tiles("data, full"),
    "tiles 2 × shard 2": tiles("shard 3"),
    "tiles 4, dense": tiles("unet, whole in the middle"),
}


@pytest.mark.parametrize("name", CASES)
def test_an_axis_on_the_gpu_equals_the_sequential_model(name: str, fork_server: ForkServer) -> None:
    prove(fork_server, "test_stages", name).require()


def test_bf16_is_near_the_sequential_model(fork_server: ForkServer) -> None:
    prove(fork_server, "test_stages", "pipe 2, 1f1b × shard 2", precision="bf16").require()


def test_a_lost_message_is_found(fork_server: ForkServer) -> None:
    failure = prove(fork_server, "test_stages", "pipe 4, 1f1b", spoiled="messages").first_failure
    assert failure is not None
    assert failure.what in ("loss", "gradient norm", "worst gradient")


def test_a_lost_message_is_found_in_bf16(fork_server: ForkServer) -> None:
    assert not prove(fork_server, "test_stages", "pipe 4, 1f1b", spoiled="messages", precision="bf16").passed


# --- memory

LAW = 0.02


class Peak(NamedTuple):
    measured: int
    predicted: int


class Peaks(NamedTuple):
    """Bytes of each rank of a pipeline beside its state."""

    measured: list[int]
    predicted: list[int]


def peaks(fork_server: ForkServer, name: str, late: str = "") -> Peaks:
    return Peaks(*fork_server.call("peaks", name=name, late=late))


@pytest.mark.parametrize("name", SMALLER)
def test_a_smaller_pipeline_saves_what_is_predicted(name: str, fork_server: ForkServer) -> None:
    large, small = (Peak(*map(max, peaks(fork_server, plan))) for plan in SMALLER[name])  # of the fullest rank
    assert large.measured == pytest.approx(large.predicted, rel=LAW)
    assert small.measured == pytest.approx(small.predicted, rel=LAW)
    saved = large.measured - small.measured
    assert saved == pytest.approx(large.predicted - small.predicted, abs=LAW * large.measured)
    assert saved > 0.1 * large.measured


@pytest.mark.parametrize("name", LATE)
def test_what_is_freed_early_saves_what_is_predicted(name: str, fork_server: ForkServer) -> None:
    early, late = peaks(fork_server, LATE[name].plan), peaks(fork_server, LATE[name].plan, name)
    assert early.measured == pytest.approx(early.predicted, rel=LAW)
    assert late.measured == pytest.approx(late.predicted, rel=LAW)
    saved = [after - before for after, before in zip(late.measured, early.measured, strict=True)]
    expected = [after - before for after, before in zip(late.predicted, early.predicted, strict=True)]
    assert saved == pytest.approx(expected, abs=(LATE[name].slack + 0.1) * LARGE.message_bytes)
    assert max(saved) > 0.8 * LARGE.message_bytes
