"""Experts in fp8 from tokens to sums: against products of rounded numbers by hand, and how far they are from exact."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from experts_for_tests import CONFIG
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from weft.models.expert_rows import RowOrder, align_groups, fill_slots, sort_by_expert, through_experts
from weft.models.experts import StackedExperts, stacked_experts
from weft.parallel.fp8.experts import fp8_stacked_experts, fp8_through_experts
from weft.parallel.fp8.operations import DTYPE, LARGEST, quantise_rows, row_factors, scale_of, turn_rows

NUM_EXPERTS, K, HIDDEN, INNER, NUM_TOKENS = 4, 2, 64, 48, 45
NAMES = ("out", "tokens", "weights", "gate_up", "down")


def made() -> StackedExperts:
    experts = StackedExperts(replace(CONFIG, hidden_size=HIDDEN, moe_intermediate_size=INNER), NUM_EXPERTS).bfloat16()
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, 0, 0.2)
    return experts


def routed() -> Tensor:
    chosen = torch.rand(NUM_TOKENS, NUM_EXPERTS).topk(K).indices
    return torch.where(chosen == 2, 3, chosen)  # one expert has no rows


def results(
    through: Any, experts: StackedExperts, tokens: Tensor, weights: Tensor, order: RowOrder, given: Tensor
) -> dict[str, Tensor]:
    """The sums, and the gradients of all inputs, by name."""
    inputs = (tokens.requires_grad_(), weights.requires_grad_(), *experts.parameters())
    out = through(tokens, weights, order, experts)
    return dict(zip(NAMES, (out.detach(), *torch.autograd.grad(out, inputs, given)), strict=True))


def rounded(matrix: Tensor) -> Tensor:
    """A matrix whose rows were rounded to fp8, in float64."""
    values, scale = quantise_rows(matrix)
    return values.double() * scale.double()[:, None]


def rounded_as_one(matrix: Tensor) -> Tensor:
    """A matrix rounded to fp8 with one scale, in float64."""
    return rounded(matrix.reshape(1, -1)).view_as(matrix)


def by_hand(
    experts: StackedExperts, tokens: Tensor, weights: Tensor, chosen: Tensor, given: Tensor
) -> dict[str, Tensor]:
    """The same products of rounded numbers in float64, expert after expert."""
    found = {
        "out": torch.zeros_like(tokens).double(),
        "tokens": torch.zeros_like(tokens).double(),
        "weights": torch.zeros_like(weights).double(),
    }
    of_gate_up, of_down = [], []
    for expert, (gate_up, down) in enumerate(zip(*(one.detach() for one in experts.parameters()), strict=True)):
        token, choice = (chosen == expert).nonzero().unbind(1)
        weight = weights.detach().double()[token, choice][:, None]
        rows = rounded(tokens.detach())[token]
        gate, up = (rows @ rounded(gate_up).t()).chunk(2, dim=1)
        gated = F.silu(gate) * up
        small = rounded(gated.float())
        found["out"].index_add_(0, token, weight * (small @ rounded(down).t()))
        of_gated = rounded(given)[token] @ rounded_as_one(down)
        found["weights"][token, choice] = (of_gated * gated).sum(1)
        share = gate.sigmoid()
        of_gate = weight * of_gated * up * share * (1 + gate * (1 - share))
        of_widened = rounded(torch.cat([of_gate, weight * of_gated * F.silu(gate)], 1).float())
        found["tokens"].index_add_(0, token, of_widened @ rounded_as_one(gate_up))
        of_gate_up.append(of_widened.t() @ rows)
        _, scale = quantise_rows(gated.float())
        factors = weight * scale[:, None]  # of an expert's rows, relative to the largest
        largest = (factors * quantise_rows(given)[1][token][:, None]).amax() if len(token) else torch.ones(())
        left = (given.double()[token] * factors / largest).to(DTYPE).double() * largest
        of_down.append(left.t() @ (small / scale[:, None]))
    return found | {"gate_up": torch.stack(of_gate_up), "down": torch.stack(of_down)}


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


@pytest.mark.parametrize("is_wild", [False, True], ids=["alike", "of all magnitudes"])
def test_products_are_those_of_rounded_numbers(is_wild: bool) -> None:
    torch.manual_seed(0)
    experts, chosen = made(), routed()
    magnitudes = torch.logspace(-5, 1, NUM_TOKENS)[torch.randperm(NUM_TOKENS), None] if is_wild else torch.ones(1)
    tokens, weights = torch.randn(NUM_TOKENS, HIDDEN).bfloat16(), torch.rand(NUM_TOKENS, K)
    given = (torch.randn(NUM_TOKENS, HIDDEN) * magnitudes * 1e-3).bfloat16()
    order = sort_by_expert(chosen, NUM_EXPERTS)
    found = results(fp8_through_experts, experts, tokens, weights, order, given)
    expected = by_hand(experts, tokens, weights, chosen, given)
    exact = results(through_experts, *_wide(experts, tokens, weights), order, given.double())
    for name in NAMES:
        assert error(found[name], expected[name]) < 0.025, name  # results are bf16, and close calls may differ
        assert 0.03 < error(found[name], exact[name]) < 0.1, name  # it is fp8, and no worse
    for name in ("gate_up", "down"):
        assert not found[name][2].any()
        for expert in (0, 1, 3):  # no expert pays for the largest gradients of another
            assert error(found[name][expert], exact[name][expert]) < 0.12, (name, expert)
    if is_wild:  # the smallest tokens count as much as the largest in their own rows
        for row in magnitudes[:, 0].argsort()[:5].tolist():
            assert error(found["tokens"][row], exact["tokens"][row]) < 0.15


def _wide(experts: StackedExperts, tokens: Tensor, weights: Tensor) -> tuple[StackedExperts, Tensor, Tensor]:
    wide = made().double()
    wide.load_state_dict(experts.state_dict())
    return wide, tokens.detach().double(), weights.detach().double()


@pytest.mark.parametrize("ends", [[7, 30, 30, 45], None], ids=["sent", "slots"])
def test_rows_that_are_sent_or_have_slots_are_multiplied_as_tokens(ends: list[int] | None) -> None:
    torch.manual_seed(0)
    experts, num_rows = made(), 45 if ends else 44
    rows, given = (torch.randn(num_rows, HIDDEN).bfloat16() for _ in range(2))
    rows[3] = 0  # a slot without a token
    last = None if ends is None else torch.tensor(ends, dtype=torch.int32)
    each = torch.tensor(ends or [11, 22, 33, 44])
    chosen = torch.searchsorted(each, torch.arange(num_rows), right=True)[:, None]

    def computed(compute: Any, layer: StackedExperts, values: Tensor, gradient: Tensor) -> dict[str, Tensor]:
        inputs = (values.requires_grad_(), *layer.parameters())
        out = compute(values, last, *layer.parameters())
        found = torch.autograd.grad(out, inputs, gradient)
        return dict(zip(("out", "tokens", "gate_up", "down"), (out.detach(), *found), strict=True))

    found = computed(fp8_stacked_experts, experts, rows, given)
    expected = by_hand(experts, rows, torch.ones(num_rows, 1), chosen, given)
    wide, values, _ = _wide(experts, rows, torch.ones(1))
    exact = computed(stacked_experts, wide, values, given.double())
    for name, one in found.items():
        assert error(one, expected[name]) < 0.025, name
        assert 0.03 < error(one, exact[name]) < 0.1, name
    layer = made().float()  # not bf16: as it was
    assert torch.equal(
        fp8_stacked_experts(rows.float(), last, *layer.parameters()),
        stacked_experts(rows.float(), last, *layer.parameters()),
    )
    assert fp8_stacked_experts(rows[:0], each.int() * 0, *experts.parameters()).shape == (0, HIDDEN)


def test_scales_are_powers_of_two_that_use_the_range() -> None:
    largest = torch.cat([torch.logspace(-15, 20, 400), torch.tensor([LARGEST, 2 * LARGEST, 1.0])])
    scale = scale_of(largest)
    assert (torch.frexp(scale).mantissa == 0.5).all()
    assert ((largest / scale > LARGEST / 2 * (1 - 1e-6)) & (largest / scale <= LARGEST * (1 + 1e-6))).all()
    assert scale_of(torch.tensor([LARGEST])).item() == 1.0
    assert scale_of(torch.zeros(1)).item() > 0


def test_factors_leave_no_number_above_the_range_and_change_no_bit_of_others() -> None:
    torch.manual_seed(0)
    rows = (torch.randn(40, 16) * torch.logspace(0, 1, 40)[:, None]).bfloat16()
    values, scale = quantise_rows(rows)
    ends = torch.tensor([16, 16, 32], dtype=torch.int32)
    factors, largest = row_factors(scale, torch.ones(40), ends)
    turned = turn_rows(values, None, 1, factors, 1)[0].double().t()
    assert factors.max() == 1
    assert not factors[32:].any()
    assert not turned[32:].any()
    again = turned[:32] * torch.cat([largest[:1].expand(16), largest[2:].expand(16)])[:, None]
    held = (values.double() * scale[:, None])[:32]
    is_normal = turned[:32].abs() >= 2**-6
    assert float(is_normal.double().mean()) > 0.95
    assert torch.equal(again[is_normal], held[is_normal])


@pytest.mark.parametrize("kind", ["random", "one expert", "nothing for the first and last"])
def test_experts_end_at_multiples_and_each_pair_keeps_a_row(kind: str) -> None:
    torch.manual_seed(0)
    chosen = torch.rand(37, NUM_EXPERTS).topk(K).indices
    if kind == "one expert":
        chosen = torch.full((37, K), 3)
    elif kind != "random":
        chosen = torch.randint(1, 3, (37, K))
    order = sort_by_expert(chosen, NUM_EXPERTS)
    found = align_groups(order, 16)
    assert order.ends is not None
    assert not (found.ends % 16).any()
    assert found.ends.dtype == torch.int32
    assert len(found.sources) % 16 == 0
    assert int(found.ends[-1]) <= len(found.sources)
    assert torch.equal(found.sources[found.places], torch.arange(37 * K))
    assert int((found.sources < 37 * K).sum()) == 37 * K
    expert = torch.searchsorted(found.ends.long(), found.places, right=True)
    assert torch.equal(expert, chosen.flatten())
    assert (
        found.ends.diff(prepend=torch.zeros(1, dtype=torch.int32)) - 16
        < order.ends.diff(prepend=order.ends[:0].sum()[None])
    ).all()


def test_other_experts_compute_as_before() -> None:
    torch.manual_seed(0)
    experts, chosen = made(), routed()
    tokens, weights = torch.randn(NUM_TOKENS, HIDDEN), torch.rand(NUM_TOKENS, K)
    slots = fill_slots(chosen[None], NUM_EXPERTS, 20)
    for layer, rows, order in (
        (experts, tokens.bfloat16(), slots),
        (made().float(), tokens, sort_by_expert(chosen, 4)),
    ):
        assert torch.equal(
            fp8_through_experts(rows, weights, order, layer), through_experts(rows, weights, order, layer)
        )


def test_recompute_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    experts, order = made(), sort_by_expert(routed(), NUM_EXPERTS)
    tokens, weights = torch.randn(NUM_TOKENS, HIDDEN).bfloat16(), torch.rand(NUM_TOKENS, K)
    given = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    again = partial(checkpoint, fp8_through_experts, use_reentrant=False)
    first, second = (results(one, experts, tokens, weights, order, given) for one in (fp8_through_experts, again))
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name


@pytest.mark.soak
def test_a_compiled_graph_is_whole_and_gives_the_same_bits() -> None:
    torch.manual_seed(0)
    experts, order = made(), sort_by_expert(routed(), NUM_EXPERTS)
    tokens, weights = torch.randn(NUM_TOKENS, HIDDEN).bfloat16(), torch.rand(NUM_TOKENS, K)
    given = torch.randn(NUM_TOKENS, HIDDEN).bfloat16()
    compiled = torch.compile(fp8_through_experts, backend="aot_eager", fullgraph=True, dynamic=False)
    first, second = (results(one, experts, tokens, weights, order, given) for one in (fp8_through_experts, compiled))
    for name in NAMES:
        assert torch.equal(first[name], second[name]), name
