"""Documents that share a sequence do not see each other, in one process and over `context`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from models_for_tests import small_config
from runs_for_tests import write_run_file
from torch import Tensor

from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import GPT2Config, ModelConfig, build, initialise
from weft.parallel.apply import parallelize
from weft.parallel.context.axis import own_tokens
from weft.parallel.model_state import named_pieces
from weft.plan import Context, Memory, Pipe, Plan
from weft.plan import Tensor as TensorAxes
from weft.run_file import load_run
from weft.step.documents import document_traffic, number_documents, separate_documents
from weft.step.train_step import evaluate, train_step

pytestmark = pytest.mark.processes

END = 60
ALONE = Axis("context", 1, 0, None, Ledger())
CONFIGS: list[ModelConfig] = [
    small_config(vocab_size=61, width=16, inner=24, layers=2, heads=4, keys=2),
    GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=4),
]  # fmt: skip


def tokens() -> Tensor:
    """Two sequences of 16: documents of 5, 3 and 8 tokens, and of 1 and 15."""
    made = torch.randint(0, END, (2, 16), generator=torch.Generator().manual_seed(0))
    made[0, [4, 7]] = END
    made[1, 0] = END
    return made


def model_of(config: ModelConfig) -> torch.nn.Module:
    model = build(config)
    initialise(model, 0)
    return model.double()


def test_documents_are_numbered_by_the_ends_before_them() -> None:
    assert number_documents(tokens(), END)[0].tolist() == [0] * 5 + [1] * 3 + [2] * 8
    assert number_documents(tokens(), END)[1].tolist() == [0] + [1] * 15


def test_a_document_is_not_changed_by_its_neighbours() -> None:
    model, given = model_of(CONFIGS[0]), tokens()
    separate_documents(model, END, ALONE)
    other = given.clone()
    other[0, :4] = (other[0, :4] + 1) % END  # another first document
    first, second = model(given), model(other)
    assert torch.equal(first[0, 5:], second[0, 5:])
    assert not torch.allclose(first[0, :4], second[0, :4])
    joined = model_of(CONFIGS[0])
    assert not torch.allclose(joined(given)[0, 5:], joined(other)[0, 5:])  # the control: they would see each other


@pytest.mark.parametrize("config", CONFIGS, ids=["decoder", "gpt2"])
@pytest.mark.parametrize(
    "plan",
    [
        Plan(context=Context(2), precision="fp64"),
        Plan(context=Context(4, "all-to-all"), precision="fp64"),
        Plan(context=Context(2), tensor=TensorAxes(2), memory=Memory("full"), precision="fp64"),
    ],
    ids=lambda plan: plan.describe_axes(),
)
def test_documents_stay_apart_over_context(plan: Plan, config: ModelConfig) -> None:
    whole = model_of(config)
    separate_documents(whole, END, ALONE)
    expected = whole(tokens()).detach()  # [batch, sequence, vocab]

    def rank(_: int) -> list[float]:
        mesh = Mesh(plan)
        model = parallelize(model_of(config), plan, mesh)
        separate_documents(model, END, mesh["context"])
        logits = model(*own_tokens((tokens(),), mesh["context"]))
        (own,) = own_tokens((expected,), mesh["context"])
        width = logits.shape[-1]
        start = 0 if width == 61 else 31 * mesh["x"].index
        difference = (logits - own[..., start : start + width]).abs().max()
        return [float(difference.detach()), float(mesh.ledger.entries()["context", "all_gather"].num_bytes)]

    for difference, gathered in run_local(rank, plan.num_ranks):
        assert difference < 1e-12
        assert gathered == 2 * 16 * 8


def micro_batches() -> list[tuple[Tensor, Tensor]]:
    """Four, whose documents end at other places: what is computed with another's ids has another loss."""
    made = []
    for number in range(4):
        drawn = torch.randint(0, END, (2, 17), generator=torch.Generator().manual_seed(number))
        drawn[0, 2 + 3 * number], drawn[1, 13 - 2 * number] = END, END
        made.append((drawn[:, :-1].contiguous(), drawn[:, 1:].clone()))
    return made


def trained(config: ModelConfig, plan: Plan, is_apart: bool = True) -> tuple[list[float], dict[str, list[float]]]:
    """Losses before and after a step, the bytes gathered over `context` in it, and this rank's parameters behind it."""
    mesh = Mesh(plan)
    model = parallelize(model_of(config), plan, mesh, example=lambda: (torch.zeros(2, 16, dtype=torch.long),))
    if is_apart:
        separate_documents(model, END, mesh["context"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = evaluate(model, micro_batches(), mesh)
    mesh.ledger.clear()
    result = train_step(model, optimizer, micro_batches(), mesh, clip=None)
    gathered = mesh.ledger.entries().get(("context", "all_gather"))
    losses = [float(before), float(result.loss), float(gathered.num_bytes if gathered else 0)]
    return losses, {part.parameter.name: piece.detach().flatten().tolist() for part, piece in named_pieces(model)}


PIPE = Plan(pipe=Pipe(2), precision="fp64")


@pytest.mark.parametrize(
    "plan",
    [
        PIPE,
        replace(PIPE, memory=Memory("full")),
        replace(PIPE, memory=Memory("selective")),
        Plan(pipe=Pipe(2, "interleaved"), memory=Memory("full"), precision="fp64"),
        Plan(pipe=Pipe(2, "gems"), memory=Memory("full"), precision="fp64"),
        Plan(pipe=Pipe(2), context=Context(2), memory=Memory("full"), precision="fp64"),
        Plan(pipe=Pipe(2, "interleaved"), context=Context(2), precision="fp64"),
    ],
    ids=lambda plan: f"{plan.describe_axes()} {plan.pipe.schedule} {plan.memory.recompute}",
)
def test_documents_stay_apart_in_a_pipeline(plan: Plan) -> None:
    """Each stage computes a micro-batch, and computes it again in backward, with the documents of that one."""
    config = replace(CONFIGS[0], num_hidden_layers=4)
    (losses, parameters) = trained(config, Plan(precision="fp64"))
    assert losses[0] != pytest.approx(trained(config, Plan(precision="fp64"), is_apart=False)[0][0], rel=1e-6)
    names = set()
    for found, here in run_local(lambda _: trained(config, plan), plan.num_ranks):
        assert found[:2] == pytest.approx(losses[:2], rel=1e-12)
        assert found[2] == (0 if plan.context.degree == 1 else 4 * 2 * 16 * 8)  # once for each micro-batch
        for name, values in here.items():
            assert values == pytest.approx(parameters[name], rel=1e-9, abs=1e-11), name
        names |= set(here)
    assert names == set(parameters)


def test_the_run_file_asks_for_it_and_the_prediction_counts_it(tmp_path: Path) -> None:
    path = write_run_file(tmp_path)
    run = load_run(path, ["data.documents=separate", "plan.context=2"])
    assert document_traffic(run)["context", "all_gather"].num_bytes == run.split.accumulation * (
        run.split.micro_batch * run.split.sequence * 8
    )
    assert document_traffic(load_run(path)) == {}


def test_a_model_with_its_own_attention_is_refused() -> None:
    with pytest.raises(PlanError, match="needs weft's own attention, which Linear lacks"):
        separate_documents(torch.nn.Linear(2, 2), END, ALONE)
