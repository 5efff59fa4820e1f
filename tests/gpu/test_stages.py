"""Pipelines and tiles on GPU ranks that share a GPU, each beside another axis: equal to the sequential model there."""

from __future__ import annotations

import pytest
import test_tile
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
    model, plan = test_tile.CASES[name]
    return Case(*test_tile.MODELS[model], plan)


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
