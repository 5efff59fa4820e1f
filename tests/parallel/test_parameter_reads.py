"""Parameters that code outside of their module or block reads: exact where the whole is in memory, else refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from weft.errors import PlanError
from weft.models.loss_head import logits_of

pytestmark = pytest.mark.processes

WIDTH, CLASSES = 8, 12
PLANS = {
    "data": weft.Plan(data=2),
    "stage 1": weft.Plan(shard=weft.Shard(2, 1)),
    "stage 3": weft.Plan(shard=weft.Shard(2, 3)),
    "x": weft.Plan(tensor=weft.Tensor(2)),
    "pipe": weft.Plan(pipe=weft.Pipe(2), micro_batch=2),
}


def batch(step: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, CLASSES, (4, 5), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up_proj, self.down_proj = (
            nn.LayerNorm(WIDTH),
            nn.Linear(WIDTH, 2 * WIDTH),
            nn.Linear(2 * WIDTH, WIDTH),
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down_proj(F.gelu(self.up_proj(self.norm(hidden))))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.run(self.embedding(tokens)))


def size(block: nn.Module) -> Tensor:
    return block.up_proj.weight.square().mean()  # type: ignore[union-attr, operator]


class ReadBefore(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        factor = 1 + size(self.blocks[0])
        return super().forward(tokens) * factor


class ReadWithoutGradient(Model):
    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out * (1 + size(self.blocks[0]).detach())


class Borrowing(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * (1 + size(self.__dict__["other"][0]))


class BlockReadsAnother(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Borrowing()
        self.blocks[1].__dict__["other"] = [self.blocks[0]]


class ReadsItsOwn(Model):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1] = Borrowing()
        self.blocks[1].__dict__["other"] = [self.blocks[1]]


class DirectForward(Model):
    def run(self, hidden: Tensor) -> Tensor:
        for block in self.blocks:
            hidden = block.forward(hidden)
        return hidden


def penalised(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    """A loss with a penalty that grows with the number of targets, as a sum over them must."""
    loss = F.cross_entropy(logits_of(model(batch[0])).flatten(0, 1), batch[1].flatten(), reduction="sum")
    return loss + size(model.blocks[1]) * batch[1].numel()  # type: ignore[index, union-attr]


PENALTY = weft.Objective(lambda batch: torch.tensor(batch[1].numel()), penalised)


@pytest.mark.parametrize("plan", ["data", "stage 1"])
@pytest.mark.parametrize("model", [ReadBefore, ReadWithoutGradient, BlockReadsAnother, DirectForward])
def test_whole_parameters_are_read_anywhere(plan: str, model: Callable[[], nn.Module]) -> None:
    weft.verify(model, batch, PLANS[plan], steps=2).require()


def test_a_penalty_in_the_objective_reads_whole_parameters() -> None:
    weft.verify(Model, batch, PLANS["stage 1"], objective=PENALTY, steps=2).require()


def test_a_block_reads_its_own_parameters_in_stage_3() -> None:
    weft.verify(ReadsItsOwn, batch, PLANS["stage 3"], steps=2).require()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("model", "plan", "words"),
    [
        (ReadBefore, "stage 3", r"the model's own forward reads parameter 'blocks\.0\.up_proj\.weight'.*stage 1 or 2"),
        (ReadWithoutGradient, "stage 3", r"own forward reads parameter 'blocks\.0\.up_proj\.weight' outside of a call"),
        (BlockReadsAnother, "stage 3", r"'blocks\.1' reads parameter 'blocks\.0\.up_proj\.weight'.*stage = 3 frees"),
        (
            DirectForward,
            "stage 3",
            r"'blocks\.0\.norm' is called outside of a call of block 'blocks\.0'.*call the block",
        ),
        (ReadBefore, "x", r"'blocks\.0\.up_proj\.weight' is used outside of the forward of 'blocks\.0\.up_proj'"),
        (
            ReadWithoutGradient,
            "x",
            r"'blocks\.0\.up_proj\.weight' is used outside of the forward of 'blocks\.0\.up_proj'",
        ),
        (
            BlockReadsAnother,
            "x",
            r"'blocks\.0\.up_proj\.weight' is used outside of the forward of 'blocks\.0\.up_proj'",
        ),
        (ReadsItsOwn, "x", r"'blocks\.1\.up_proj\.weight' is used outside of the forward of 'blocks\.1\.up_proj'"),
        (DirectForward, "x", r"'blocks\.0\.norm' is called outside of a call of block 'blocks\.0'.*tensor\.x = 1"),
        (
            ReadBefore,
            "pipe",
            r"uses parameter 'blocks\.0\.up_proj\.weight' of another stage from outside; use pipe = 1",
        ),
        (BlockReadsAnother, "pipe", r"'blocks\.1' reads parameter 'blocks\.0\.up_proj\.weight', which another stage"),
        (DirectForward, "pipe", r"calls 'blocks\.0\.norm' outside of a call of 'blocks\.0'.*not its \.forward"),
    ],
)
def test_other_reads_are_refused_by_name(model: Callable[[], nn.Module], plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        weft.verify(model, batch, PLANS[plan])


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("stage 3", r"the objective reads parameter 'blocks\.1\.up_proj\.weight' outside of a call of its block"),
        ("pipe", r"the objective reads parameter 'blocks\.1\.up_proj\.weight', and a stage .* has only its own"),
    ],
)
def test_a_penalty_in_the_objective_is_refused_by_name(plan: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        weft.verify(Model, batch, PLANS[plan], objective=PENALTY)


# --- writes


class Clamped(nn.Linear):
    """Keeps its weight small, as critics of some adversarial models do."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class Emptied(nn.Linear):
    def forward(self, hidden: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight[0] = 0.0
        return super().forward(hidden)


def with_linears(kind: type[nn.Linear]) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        block.down_proj = kind(2 * WIDTH, WIDTH)
    return model


@pytest.mark.parametrize("name", ["data", "stage 1", "x", "pipe"])
def test_a_parameter_that_its_forward_changes_is_exact_where_it_is_no_copy(name: str) -> None:
    weft.verify(lambda: with_linears(Clamped), batch, PLANS[name], steps=2).require()


@pytest.mark.parametrize("kind", [Clamped, Emptied])
def test_a_change_that_would_be_lost_is_refused(kind: type[nn.Linear]) -> None:
    words = "'blocks.0.down_proj' changes parameter 'blocks.0.down_proj.weight' in place, where shard.stage = 3 gathers"
    with pytest.raises(PlanError, match=words):
        weft.verify(lambda: with_linears(kind), batch, PLANS["stage 3"])


def test_a_change_beside_master_weights_is_refused_when_it_is_trained() -> None:
    """A proof computes in float64, without master weights."""
    plan = weft.Plan(precision="bf16")
    mesh = weft.Mesh(plan, "cpu")
    model = weft.parallelize(with_linears(Clamped), plan, mesh, example=lambda: (batch(0)[0],))
    with pytest.raises(PlanError, match=r"the optimizer has master weights of its own.* use precision 'fp32'"):
        weft.train_step(model, weft.AdamW(model, lr=1e-2), [batch(0)], mesh)
