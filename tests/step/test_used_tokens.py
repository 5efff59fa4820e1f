"""Padding takes no place in experts and counts in nothing that routers record, under any plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from experts_for_tests import CONFIG as EIGHT
from experts_for_tests import make
from torch import Tensor, nn

from weft.architectures import Capacity, DecoderConfig
from weft.errors import PlanError
from weft.mesh import Mesh
from weft.models.expert_rows import fill_slots
from weft.models.loss import IGNORE
from weft.models.router import Router, routers_of, take_routed
from weft.parallel.apply import parallelize, refuse
from weft.plan import Context, Memory, Pipe, Plan, Shard
from weft.plan import Tensor as TensorAxes
from weft.profiling import profile
from weft.proof.prove import verify
from weft.step.documents import number_documents, separate_documents
from weft.step.preference import preference
from weft.step.train_step import train_step
from weft.step.used_tokens import used_tokens

CONFIG = replace(EIGHT, num_experts=4)
Z_LOSS = replace(CONFIG, router_z_loss_coef=0.1)
BALANCE = replace(Z_LOSS, router_aux_loss_coef=0.5)
RANDOM = replace(BALANCE, capacity=Capacity(1.0, 1, "random"))
BIASES = replace(
    BALANCE, architecture="deepseek_v3", qk_norm=None, q_lora_rank=None, kv_lora_rank=8,
    qk_nope_head_dim=4, qk_rope_head_dim=4,
    v_head_dim=4, num_key_value_heads=4, router_bias_update_rate=0.05, n_group=1, topk_group=1, n_shared_experts=1,
    first_k_dense_replace=0,
)  # fmt: skip
LENGTHS = (3, 16, 7, 5)


def padded(step: int) -> tuple[Tensor, Tensor]:
    """Four sequences of 16, of which 3, 16, 7 and 5 tokens are no padding, and the first targets are ignored."""
    drawn = torch.randint(1, 61, (4, 17), generator=torch.Generator().manual_seed(step))
    inputs, labels = drawn[:, :-1].clone(), drawn[:, 1:].clone()
    labels[:, 0] = IGNORE  # a prompt
    for row, length in enumerate(LENGTHS):
        inputs[row, length:], labels[row, length:] = 0, IGNORE
    return inputs, labels


# --- which tokens


@pytest.mark.parametrize("separate", [False, True])
def test_tokens_before_a_target_of_their_document_are_used(separate: bool) -> None:
    rng = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 9, (50, 8), generator=rng).masked_fill(torch.rand(50, 8, generator=rng) < 0.6, IGNORE)
    documents = (
        number_documents(torch.randint(0, 4, (50, 8), generator=rng), 0) if separate else labels.new_zeros(50, 8)
    )
    expected = [
        [any(labels[b, q] != IGNORE and documents[b, q] == documents[b, p] for q in range(p, 8)) for p in range(8)]
        for b in range(50)
    ]
    assert used_tokens(labels, documents if separate else None).tolist() == expected
    assert 0.2 < torch.tensor(expected).double().mean() < 0.9


def test_padding_takes_no_slot() -> None:
    rng = torch.Generator().manual_seed(0)
    experts = torch.rand(4, 16, 4, generator=rng).topk(2).indices
    used = used_tokens(padded(0)[1])
    priorities = torch.randint(0, 10**9, (4, 16), generator=rng)
    slots = fill_slots(experts, 4, 8, priorities, used)
    kept = (slots.places < 4 * 4 * 8).view(4, 16, 2)
    for row in range(4):
        for expert in range(4):
            pairs = [(t, c) for t in range(16) for c in range(2) if used[row, t] and experts[row, t, c] == expert]
            taken = sorted(pairs, key=lambda pair: int(priorities[row, pair[0]]))[:8]
            chosen = [(t, c) for t in range(16) for c in range(2) if kept[row, t, c] and experts[row, t, c] == expert]
            assert sorted(taken) == chosen
    everyone = fill_slots(experts, 4, 8, priorities)
    assert (everyone.places >= 4 * 4 * 8).view(4, 16, 2)[used].sum() > (~kept)[used].sum()  # the control


# --- what routers record, against plain loops over the tokens that are no padding


def one_step(config: DecoderConfig, batch: Any, **options: Any) -> tuple[nn.Module, float, dict[str, Tensor]]:
    """A model after a step, its loss, and what its routers were given."""
    model, given = make(config).double(), {}
    handles = [
        router.register_forward_hook(lambda module, args, _, name=name: given.update({name: args[0].detach().clone()}))
        for name, router in routers_of(model).items()
    ]
    parallel = parallelize(model, Plan(precision="fp64"), Mesh(Plan(precision="fp64")))
    if options.pop("documents", False):
        separate_documents(parallel, None, Mesh(Plan())["context"])
    optimizer = torch.optim.SGD(parallel.parameters(), lr=0.0)
    loss = float(train_step(parallel, optimizer, [batch], Mesh(Plan(precision="fp64")), **options).loss)
    for handle in handles:
        handle.remove()
    return parallel, loss, given


def plain_losses(router: Router, hidden: Tensor, used: Tensor) -> tuple[Tensor, Tensor]:
    """The losses of a router, summed over used tokens, and how many of these chose each expert."""
    total, counts = hidden.new_zeros(()), hidden.new_zeros(router.num_experts)
    for row in range(len(hidden)):
        logits = hidden[row][used[row]] @ router.weight.double().T
        if router.is_sigmoid:
            scores = logits.sigmoid()
            probabilities = scores / scores.sum(-1, keepdim=True)
            experts = scores.topk(2).indices
        else:
            probabilities = logits.softmax(-1)
            experts = probabilities.topk(2).indices
        own = experts.flatten().bincount(minlength=router.num_experts).double()
        share = own / (len(logits) * 2) * router.num_experts
        total = total + router.z_loss * logits.logsumexp(-1).square().sum()
        total = total + router.balance * len(logits) * (share * probabilities.mean(0)).sum()
        counts = counts + own
    return total, counts


@pytest.mark.parametrize("config", [BALANCE, RANDOM, BIASES], ids=["balance", "capacity", "biases"])
def test_losses_and_counts_are_those_of_tokens_without_padding(config: DecoderConfig) -> None:
    batch = padded(0)
    used = torch.arange(16) < torch.tensor(LENGTHS)[:, None]
    plain = replace(config, router_aux_loss_coef=0.0, router_z_loss_coef=0.0)
    _, without, _ = one_step(plain, batch)
    model, loss, given = one_step(config, batch)
    totals, num_used = 0.0, sum(LENGTHS)
    routed = take_routed(model)
    for number, (name, router) in enumerate(routers_of(model).items()):
        expected, counts = plain_losses(router, given[name], used)
        totals += float(expected.detach()) / num_used
        assert torch.equal(routed[number][:-3], counts)
        assert routed[number][-1] == num_used
        if router.bias_rate:
            change = router.bias_rate * (counts.mean() - counts).sign()
            assert torch.allclose(router.e_score_correction_bias.double(), change)
    assert loss == pytest.approx(without + totals, rel=1e-12)


def test_real_tokens_of_preferences_are_not_dropped_for_padding() -> None:
    """With 88 % padding no expert is full, so nothing is dropped."""
    inputs = torch.zeros(2, 2, 32, dtype=torch.long)
    inputs[..., :4] = torch.randint(1, 61, (2, 2, 4), generator=torch.Generator().manual_seed(0))
    labels = torch.full_like(inputs, IGNORE)
    labels[..., 1:4] = 7
    batch = inputs, labels, torch.zeros(2, 2, dtype=torch.float64)
    model, _, _ = one_step(RANDOM, batch, objective=preference(0.1))
    for routed in take_routed(model):
        counts, dropped = routed[:-3], routed[-3]
        assert counts.sum() == 2 * 4 * 4
        assert dropped == 0


def test_what_follows_the_last_answer_of_a_conversation_is_padding_too() -> None:
    inputs, labels = padded(0)
    marked = inputs.clone()
    marked[1, 7] = ~marked[1, 7]  # a document ends
    labels[1, 5:8] = IGNORE  # without answers behind its fifth token
    model, _, _ = one_step(BALANCE, (marked, labels), documents=True)
    whole, _, _ = one_step(BALANCE, (inputs, labels))
    assert take_routed(model)[0][-1] == sum(LENGTHS) - 3
    assert take_routed(whole)[0][-1] == sum(LENGTHS)


# --- under any plan


def of(config: DecoderConfig) -> Callable[[], nn.Module]:
    return partial(make, config)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "plan"),
    [
        (RANDOM, Plan(expert=2, data=2, micro_batch=1)),
        (RANDOM, Plan(shard=Shard(2), pipe=Pipe(2), micro_batch=1, memory=Memory("full"))),
        (RANDOM, Plan(expert=2, tensor=TensorAxes(2, drop_duplicates=True))),
        (Z_LOSS, Plan(context=Context(2), expert=2, expert_over=("context",))),
        (CONFIG, Plan(tensor=TensorAxes(2, sequence=True), data=2)),
        (BALANCE, Plan(tensor=TensorAxes(y=2), expert=2, memory=Memory("selective"))),
        (BIASES, Plan(expert=2, pipe=Pipe(2), micro_batch=1, memory=Memory("full"))),
    ],
    ids=lambda one: one.describe_axes() if isinstance(one, Plan) else "",
)
def test_plans_are_proved(config: DecoderConfig, plan: Plan) -> None:
    verify(of(config), padded, plan, steps=2).require()


def test_losses_of_parts_of_sequences_are_refused() -> None:
    """What was reported lacked the tokens of the other ranks of x."""
    with pytest.raises(PlanError, match="router_z_loss_coef"):
        refuse(profile(make(Z_LOSS)), Plan(tensor=TensorAxes(2, sequence=True)))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("config", "plan"),
    [(RANDOM, Plan(data=2)), (Z_LOSS, Plan(context=Context(2)))],
    ids=["capacity", "z-loss"],
)
def test_padding_that_counts_is_noticed(config: DecoderConfig, plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.step.train_step.UsedTokens.tell", lambda self, index: None)
    report = verify(of(config), padded, plan, steps=1)
    assert "loss" in {check.what for check in report.checks if not check.passed}
