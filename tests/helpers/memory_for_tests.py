"""Memory: the most bytes that tensors of a training step take on forked ranks, models for it, and slow copies."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import models_for_tests as models
import torch
import torch._dynamo
from torch import Tensor, nn

from weft.cluster.hardware import Cluster, load
from weft.inspection.live_bytes import LiveTensors
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, GPT2Config, RecurrentConfig, build, initialise
from weft.optim.saved_state import make_optimizer
from weft.parallel.apply import parallelize
from weft.parallel.model_state import state_tensors
from weft.plan import Plan
from weft.run_file import Run, load_run
from weft.sharding.host_memory import CopyStream
from weft.step.batch import Batch
from weft.step.examples import example_inputs
from weft.step.train_step import train_step


def peak_bytes(run: Run, random_batch: Callable[[Run, int], Batch]) -> int:
    """The most that any rank of a run held in its second step, with batches of these seeds."""

    def rank(index: int) -> int:
        mesh = Mesh(run.plan)
        whole = build(run.model)
        initialise(whole, run.train.seed)
        model = parallelize(whole, run.plan, mesh, example=lambda: example_inputs(run))
        optimizer = make_optimizer(model, run.train)
        batches = [random_batch(run, number) for number in range(run.split.accumulation)]
        train_step(model, optimizer, batches, mesh)  # which makes gradients and the optimizer's state
        held = [tensor for tensors in state_tensors(model, optimizer).values() for tensor in tensors]
        with LiveTensors(held) as live:
            train_step(model, optimizer, batches, mesh)
        peak: int = live.peak_bytes
        return peak

    found: list[int] = run_local(rank, run.plan.num_ranks)
    return max(found)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SEQUENCE = 64  # half of the example's, for time
NARROW = ("model.hidden_size=24", "model.intermediate_size=64")  # where a CPU may be 300 times slower: it has no bf16


def make_run(plan: Plan) -> Run:
    """The quickstart with four blocks, under another plan."""
    narrow = NARROW if plan.precision == "bf16" else ()
    run = load_run(QUICKSTART, [f"data.sequence={SEQUENCE}", "model.num_hidden_layers=4", *narrow])
    return under_plan(run, plan)


def random_batch(run: Run, seed: int) -> Batch:
    generator, shape = torch.Generator().manual_seed(seed), (run.split.micro_batch, run.split.sequence + 1)
    assert isinstance(run.model, DecoderConfig | RecurrentConfig)
    tokens = torch.randint(0, run.model.vocab_size, shape, generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def gpt2() -> nn.Module:
    """With dropout everywhere."""
    config = GPT2Config(
        vocab_size=61, n_positions=11, n_embd=16, n_layer=5, n_head=4, resid_pdrop=0.1, attn_pdrop=0.1, embd_pdrop=0.1
    )
    return initialised(build(config))


def llama(num_layers: int = 5) -> nn.Module:
    config = DecoderConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=num_layers, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return initialised(build(config))


def initialised(model: Any) -> nn.Module:
    initialise(model, 0)
    made: nn.Module = model
    return made


def under_plan(run: Run, plan: Plan) -> Run:
    """The run under a plan: two micro-batches of 4 or one of 8 for each rank, and four where there is a pipeline."""
    batch = (16 if plan.pipe.degree > 1 else 8) * plan.num_batch_ranks
    return replace(run, plan=plan, train=replace(run.train, batch=batch))


def with_memory(cluster: Cluster, device_bytes: float) -> Cluster:
    """The cluster with devices of so much memory."""
    device = replace(cluster.node.device, memory_bytes=int(device_bytes))
    return replace(cluster, node=replace(cluster.node, device=device))


def on_h200(link: float, *overrides: str) -> tuple[Run, Cluster]:
    """The quickstart on one H200 with a link of so many bytes a second to its host."""
    run = load_run(QUICKSTART, ["plan.precision=bf16", "plan.data=1", "plan.shard=1", *overrides])
    cluster = load("h200")
    return run, replace(cluster, node=replace(cluster.node, host_link_bytes_per_second=link))


def micro_batches(step: int, count: int) -> list[Batch]:
    tokens, labels = models.token_batch(step)
    return list(zip(tokens.chunk(count), labels.chunk(count), strict=True))


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    assert one.keys() == other.keys()
    return [name for name in one if not torch.equal(one[name], other[name])]


class Slow(CopyStream):
    """Copies when it is waited for, from what is there then; until then there is rubbish at both ends."""

    waits = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.asked: list[Callable[[], None]] = []

    def copy(self, target: Tensor, source: Tensor, behind: Any = None) -> Any:
        target.fill_(255)
        held = weakref.ref(source)

        def run() -> None:
            if behind is not None:
                behind()
            given = held()
            target.copy_(torch.full_like(target, 255) if given is None else given)

        self.asked.append(run)
        return lambda: self._run_until(run)

    def wait(self, event: Any) -> None:
        if self.waits and event is not None:
            event()

    def _run_until(self, last: Callable[[], None]) -> None:
        while last in self.asked:
            self.asked.pop(0)()


class NeverWaits(Slow):
    waits = False
