"""Axes within layers on GPU ranks that share a GPU, each beside another: equal to the sequential model on that GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from branches_for_tests import MODELS as BRANCHED
from branches_for_tests import SPLIT_MODELS
from experts_for_tests import batch as routed_batch
from experts_for_tests import make, make_balanced
from gpu_for_tests import Case, prove, succeeded, weft, write_run
from tensor_for_tests import SHIPPED, token_batch
from torch import nn

from weft.launch.fork_server import ForkServer
from weft.plan import Branch, Context, Memory, Pipe, Plan, Shard, Tensor

TIED = SHIPPED["tied"]


def text(**plan: object) -> Case:
    return Case(TIED, token_batch, Plan(**{"micro_batch": 2, **plan}))  # type: ignore[arg-type]


def experts(model: Callable[[], nn.Module] = make_balanced, **plan: object) -> Case:
    return Case(model, routed_batch, Plan(**plan))  # type: ignore[arg-type]


def branches(name: str, **plan: object) -> Case:
    return Case(*BRANCHED[name], Plan(**plan))  # type: ignore[arg-type]


CASES: dict[str, Case] = {
    "data 2": text(data=2),
    "data 4, hierarchical": text(data=4, micro_batch=1, hierarchical=True)._replace(ranks_per_node=2),
    "shard 4, hierarchical": text(shard=Shard(4, 3), micro_batch=1, hierarchical=True)._replace(ranks_per_node=2),
    "data 2 × shard 2, stage 1": text(data=2, shard=Shard(2, 1)),
    "data 2 × shard 2, stage 2": text(data=2, shard=Shard(2, 2)),
    "data 2 × shard 2, stage 3": text(data=2, shard=Shard(2, 3)),
    "shard 4, stage 3, full recompute": text(shard=Shard(4, 3), memory=Memory("full")),
    "shard 2, offload": text(shard=Shard(2, 2), memory=Memory(offload=1.0)),
    "shard 2, activations": text(shard=Shard(2, 3), memory=Memory(activations=1.0)),
    "x 2 × data 2": text(tensor=Tensor(2), data=2),
    "x 2 × shard 2, selective recompute": text(tensor=Tensor(2), shard=Shard(2, 3), memory=Memory("selective")),
    "x 4": text(tensor=Tensor(4)),
    "y 2 × data 2": text(tensor=Tensor(1, 2), data=2),
    "x 2 × y 2": text(tensor=Tensor(2, 2)),
    "x 2, sequence × data 2": text(tensor=Tensor(2, sequence=True), data=2),
    "x 2, chunks × shard 2": text(tensor=Tensor(2, sequence=True, chunks=2), shard=Shard(2, 3)),
    "context 2, ring × data 2": text(context=Context(2), data=2),
    "context 4, ring": text(context=Context(4)),
    "context 2, all-to-all × shard 2": text(context=Context(2, "all-to-all"), shard=Shard(2, 3)),
    "expert 4": experts(expert=4),
    "expert 2 × data 2": experts(expert=2, data=2, micro_batch=1),
    "expert 2 × shard 2": experts(expert=2, shard=Shard(2, 3), memory=Memory("full")),
    "expert 2 over x 2": experts(expert=2, tensor=Tensor(2), expert_over=("x",)),
    "expert over context 2 × data 2": experts(make, context=Context(2), data=2, expert_over=("context",)),
    "branch 2, the same batch": branches("inception", branch=Branch(2)),
    "branch 2, split batch × data 2": branches("inception", branch=Branch(2, "split"), data=2),
    "branch 2 × x 2": Case(*SPLIT_MODELS["towers"], Plan(branch=Branch(2), tensor=Tensor(2))),
    "branch 2 × pipe 2": Case(*BRANCHED["inception"], Plan(branch=Branch(2), pipe=Pipe(2), micro_batch=2)),
    "branch 2, full recompute": Case(*BRANCHED["inception"], Plan(branch=Branch(2), memory=Memory("full"))),
    "expert 2 × pipe 2": experts(expert=2, pipe=Pipe(2), micro_batch=1, memory=Memory("full", keep_collectives=True)),
}


@pytest.mark.parametrize("name", CASES)
def test_an_axis_on_the_gpu_equals_the_sequential_model(name: str, fork_server: ForkServer) -> None:
    prove(fork_server, "test_axes", name).require()


COMPILED = ["data 2", "x 2 × shard 2, selective recompute", "context 2, ring × data 2"]


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_blocks_equal_the_sequential_model(name: str, fork_server: ForkServer) -> None:
    prove(fork_server, "test_axes", name, compiles=True).require()


@pytest.mark.parametrize("name", ["data 2 × shard 2, stage 3", "x 2 × y 2"])
def test_bf16_is_near_the_sequential_model(name: str, fork_server: ForkServer) -> None:
    prove(fork_server, "test_axes", name, precision="bf16").require()


def test_a_lost_reduction_is_found(fork_server: ForkServer) -> None:
    failure = prove(fork_server, "test_axes", "data 2", spoiled="reductions").first_failure
    assert failure is not None
    assert failure.what in ("loss", "gradient norm", "worst gradient")


def test_a_lost_reduction_is_found_in_bf16(fork_server: ForkServer) -> None:
    assert not prove(fork_server, "test_axes", "data 2", spoiled="reductions", precision="bf16").passed


# --- as a user does


def test_weft_verify_on_the_gpu(tmp_path: Path) -> None:
    run = write_run(tmp_path, more="\n[plan]\npipe = 2\ndata = 2\nmicro_batch = 2\n")
    found = succeeded(weft("verify", run, "--device", "cuda", "--json")).json
    assert found["passed"]
    assert found["device"] == "cuda"
    assert any(check["what"].startswith("traffic: pipe") for check in found["checks"])


def test_weft_verify_compiles_and_records_what_the_run_does(tmp_path: Path) -> None:
    from gpu_for_tests import IMAGES

    run = write_run(tmp_path, IMAGES, "\n[plan]\nprecision = 'fp32'\n")
    assert succeeded(weft("verify", run, "--device", "cuda", "--compile", "--json")).json["passed"]


def test_the_public_api_proves_on_the_gpu(tmp_path: Path) -> None:
    """From a program that has used CUDA before: ranks are fresh processes, which import its functions."""
    program = tmp_path / "prove.py"
    program.write_text(
        "import torch, weft\n"
        "from weft.models import Decoder, DecoderConfig\n"
        "def model():\n"
        "    return Decoder(DecoderConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4))\n"
        "def batch(step):\n"
        "    tokens = torch.randint(61, (8, 9), generator=torch.Generator().manual_seed(step))\n"
        "    return tokens[:, :-1], tokens[:, 1:]\n"
        "if __name__ == '__main__':\n"
        "    torch.ones(3, device='cuda', requires_grad=True).sum().backward()\n"
        "    plan = weft.Plan(shard=weft.Shard(2, 3), micro_batch=2)\n"
        "    weft.verify(model, batch, plan, device='cuda').require()\n"
        "    weft.verify(model, batch, plan).require()\n"
        "    try:\n"
        "        weft.verify(lambda: model(), batch, plan, device='cuda')\n"
        "    except weft.WeftError as error:\n"
        "        print('refused:', error)\n"
    )
    from gpu_for_tests import run_program

    left = succeeded(run_program(program))
    assert "refused: model_fn = <function <lambda>" in left.out
