"""A loop of one's own: docs/own_loop.md and examples/transformers_model.py, on ranks of torchrun and on forked ones."""

from __future__ import annotations

import io
import os
import re
import runpy
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import BatchEncoding, LlamaConfig, LlamaForCausalLM

from weft.errors import LaunchError, PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.plan import Plan
from weft.step.train_step import evaluate, train_step

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "transformers_model.py"
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def torchrun(script: Path, *arguments: str) -> str:
    """What a script prints on two ranks of torchrun."""
    environ = {name: value for name, value in os.environ.items() if name not in LAUNCHED}
    environ |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(script), *arguments], env=environ, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def on_forked_ranks(script: Path, *arguments: str) -> str:
    """What a script prints on two ranks that have joined each other already."""

    def rank(_: int) -> str:
        sys.argv[:] = [str(script), *arguments]
        with redirect_stdout(io.StringIO()) as printed:
            runpy.run_path(str(script), run_name="__main__")
        return printed.getvalue()

    return "".join(run_local(rank, 2))


@pytest.mark.processes
def test_the_page_trains_saves_and_resumes(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "own_loop.md").read_text(encoding="utf-8")
    script = tmp_path / "loop.py"
    script.write_text("\n".join(re.findall(r"```python\n(.*?)```", page, re.DOTALL)), encoding="utf-8")
    first, second = (run(script, str(tmp_path / "saved")) for run in (torchrun, on_forked_ranks))
    losses = [float(re.search(r"loss ([\d.]+)", text)[1]) for text in (first, second)]  # type: ignore[index]
    assert first.startswith("steps 0 to 20: ")
    assert second.startswith("steps 20 to 40: ")
    assert losses[1] < 0.7 * losses[0]


@pytest.mark.processes
@pytest.mark.parametrize(
    "axis", ["x", *(pytest.param(axis, marks=pytest.mark.soak) for axis in ("data", "shard", "pipe"))]
)
def test_the_example_computes_the_same_on_two_ranks(axis: str) -> None:
    printed = on_forked_ranks(EXAMPLE, "--steps", "3", "--device", "cpu", f"--{axis}", "2")
    found = re.fullmatch(r"loss ([\d.]+) -> ([\d.]+), held-out ([\d.]+) on .* 2.*\n", printed)
    alone = runpy.run_path(str(EXAMPLE))["train"](Mesh(Plan()), 3)
    assert found is not None
    expected = [alone[0], *alone[-2:]]
    assert [float(number) for number in found.groups()] == pytest.approx(expected, rel=1e-4)


def test_a_launcher_of_another_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LaunchError, match=r"2 processes .* but 1 run; start 2 \(torchrun --nproc-per-node 2"):
        Mesh(Plan(data=2))
    for name, value in dict.fromkeys(LAUNCHED[:4], "1").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "1")
    with pytest.raises(LaunchError, match=r"2 processes \(data = 2\) but torchrun started 4; start 2"):
        Mesh(Plan(data=2))


# --- batches as users of transformers write them

CONFIG = LlamaConfig(vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4)
# Losses agree to the rounding of float32, in which models of transformers compute them, also of float64 logits.
ROUNDING = 1e-6


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(CONFIG).double()


def whole_batch(mask: bool = True) -> dict[str, torch.Tensor]:
    tokens = torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(0))
    kept = torch.ones_like(tokens)
    kept[2:, 9:] = 0  # so that samples have different numbers of targets
    batch = {"input_ids": tokens, "labels": tokens.masked_fill(kept == 0, -100)}
    return {**batch, "attention_mask": kept} if mask else batch


def plain_losses(batch: dict[str, torch.Tensor]) -> list[float]:
    """Two steps and an evaluation, by torch alone."""
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(2):
        loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        return [*losses, model.eval()(**batch).loss.item()]


def losses_under(plan: Plan, batch: dict[str, torch.Tensor]) -> list[float]:
    """The same by weft: a step of one micro-batch, a step of several, and an evaluation."""
    mesh = Mesh(plan)
    inputs = {name: one[:1] for name, one in batch.items() if name != "labels"}
    model = parallelize(llama(), plan, mesh, example=lambda: inputs)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    axis = mesh["batch"]
    own = BatchEncoding({name: one[axis.index :: axis.degree] for name, one in batch.items()})
    parts = [{name: one[index : index + 1] for name, one in own.items()} for index in range(len(own["labels"]))]
    losses = [float(train_step(model, optimizer, micro_batches, mesh).loss) for micro_batches in ([own], parts)]
    return [*losses, float(evaluate(model, [own], mesh))]


def test_one_rank_takes_what_verify_takes() -> None:
    found = losses_under(Plan(precision="fp64"), whole_batch())
    assert found == pytest.approx(plain_losses(whole_batch()), rel=ROUNDING)


@pytest.mark.processes
@pytest.mark.soak
@pytest.mark.parametrize("axis", ["data", "shard", "tensor", "pipe", "context"])
def test_ranks_take_what_verify_takes(axis: str) -> None:
    batch = whole_batch(mask=axis != "context")  # which takes no padding
    expected = run_local(lambda rank: plain_losses(batch), 1)[0]
    plan = Plan(precision="fp64", **{axis: 2})
    for found in run_local(lambda rank: losses_under(plan, batch), 2):
        assert found == pytest.approx(expected, rel=ROUNDING)


class MeanOfSamples(nn.Module):
    """Its loss is the mean over samples of their means."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        parts = zip(input_ids.split(1), labels.split(1), strict=True)
        return {"loss": torch.stack([self.inner(one, labels=own).loss for one, own in parts]).mean()}


def test_batches_without_a_loss_that_adds_up_are_refused_in_words() -> None:
    batch = whole_batch(mask=False)

    def step(model: nn.Module, batches: object) -> None:
        parallel, mesh = parallelize(model, Plan(), Mesh(Plan())), Mesh(Plan())
        train_step(parallel, torch.optim.SGD(parallel.parameters(), lr=0.1), batches, mesh)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match="has no 'labels'"):
        step(llama(), [{"input_ids": batch["input_ids"]}])
    with pytest.raises(PlanError, match=r"put it into a list: \[batch\]"):
        step(llama(), batch)
    with pytest.raises(PlanError, match="loss of MeanOfSamples is not a mean over its labels"):
        step(MeanOfSamples(), [batch])
