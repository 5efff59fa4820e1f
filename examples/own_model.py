"""Your own model under a plan: prove it, then train it with your own loop on forked local processes.

python examples/own_model.py
"""

import torch
from torch import nn

import weft
from weft.launch.local_ranks import run_local


class Classifier(nn.Module):
    """A plain model that knows nothing of weft."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(10, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        return self.head(hidden)


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The whole batch of a step: 16 samples whose class is the quadrant of their first two features."""
    inputs = torch.randn(16, 10, generator=torch.Generator().manual_seed(step))
    return inputs, (inputs[:, 0] > 0) * 2 + (inputs[:, 1] > 0).long()


def train_rank(rank: int) -> list[float]:
    """What each process does."""
    torch.manual_seed(0)
    mesh = weft.Mesh(PLAN)
    model = weft.parallelize(Classifier(), PLAN, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(60):
        inputs, labels = make_batch(step)
        own = slice(rank * 4, rank * 4 + 4)  # each of the 4 ranks takes its own samples
        result = weft.train_step(model, optimizer, [(inputs[own], labels[own])], mesh)
        losses.append(result.loss.item())
    return losses


PLAN = weft.Plan(data=2, shard=weft.Shard(degree=2, stage=3))

if __name__ == "__main__":
    report = weft.verify(Classifier, make_batch, PLAN).require()
    for check in report.checks:
        print(f"{check.what:40} expected {check.expected:28} found {check.found}")
    losses = run_local(train_rank, PLAN.num_ranks)[0]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f} on {PLAN.num_ranks} processes")
