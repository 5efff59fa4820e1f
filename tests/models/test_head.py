"""Head and loss in parts: value and gradients equal those of whole logits, and whole logits never exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from tensor_for_tests import SHIPPED, TRANSFORMERS, token_batch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.live_bytes import LiveTensors
from weft.models import loss as losses
from weft.models.loss import IGNORE, ExampleLoss, count_unknown, head_loss, row_slices, rows_loss, token_loss
from weft.models.loss_head import install_loss_head, is_loss_in_head, loss_head_of
from weft.plan import Pipe, Plan
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.step.objective import CROSS_ENTROPY, with_z_loss


def example(dtype: torch.dtype = torch.float64, num_classes: int = 37, has_bias: bool = False) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 50, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(num_classes, 16, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    bias = torch.randn(num_classes, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, num_classes, (3, 50), generator=generator)
    labels[0, 10:20] = IGNORE
    return [hidden, weight, bias if has_bias else None, labels]


def gradients(total: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    given = [tensor for tensor in tensors if tensor is not None]
    return list(torch.autograd.grad(total * 0.25, given))


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("part", [2**29, 64 * 37], ids=["one part", "three parts"])
@pytest.mark.parametrize("pads", [False, True], ids=["", "padded"])
def test_parts_equal_the_whole(
    pads: bool, part: int, z_loss: float, has_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "PART_NUMEL", part)
    monkeypatch.setattr(losses, "_needs_padding", lambda tensor: pads)  # as on a GPU: 37 classes become 40
    hidden, weight, bias, labels = example(has_bias=has_bias)
    found = head_loss(hidden, weight, bias, labels, z_loss)
    expected = token_loss(F.linear(hidden, weight, bias), labels, z_loss)[0]
    assert float(found.detach()) == pytest.approx(float(expected.detach()), rel=1e-13)
    for one, other in zip(
        gradients(found, hidden, weight, bias), gradients(expected, hidden, weight, bias), strict=True
    ):
        assert float((one - other).abs().max()) <= 1e-12 * float(other.abs().max())


def test_bf16_parts_differ_from_the_exact_value_no_more_than_the_whole_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PART_NUMEL", 64 * 37)
    hidden, weight, _, labels = example(torch.bfloat16)
    exact = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    expected = gradients(token_loss(F.linear(*exact), labels)[0], *exact)
    whole = gradients(token_loss(F.linear(hidden, weight), labels)[0], hidden, weight)
    found = gradients(head_loss(hidden, weight, None, labels), hidden, weight)
    for one, other, true in zip(found, whole, expected, strict=True):
        assert one.dtype == torch.bfloat16
        assert float((one - true).abs().max()) <= 1.5 * float((other - true).abs().max()) + 2**-9 * float(
            true.abs().max()
        )


def test_what_is_frozen_gets_no_gradient_and_evaluation_none() -> None:
    hidden, weight, _, labels = example()
    expected = float(head_loss(hidden, weight, None, labels).detach())
    only_hidden = head_loss(hidden, weight.detach(), None, labels)
    assert [one.shape for one in torch.autograd.grad(only_hidden, [hidden])] == [hidden.shape]
    with torch.no_grad(), LiveTensors(held=[hidden, weight, labels]) as live:
        assert float(head_loss(hidden, weight, None, labels)) == expected
    assert live.peak_bytes < 8 * (hidden.numel() + weight.numel() + 3 * 150 * 37)
    assert float(head_loss(hidden, weight, None, torch.full_like(labels, IGNORE)).detach()) == 0.0


@given(st.integers(0, 5000), st.integers(1, 300000), st.integers(1, 2**20))
def test_parts_cover_all_rows_once(num_rows: int, num_classes: int, numel: int) -> None:
    before, losses.PART_NUMEL = losses.PART_NUMEL, numel
    try:
        found = row_slices(num_rows, num_classes)
    finally:
        losses.PART_NUMEL = before
    rows = [row for part in found for row in range(num_rows)[part]]
    assert rows == list(range(num_rows))
    assert all(part.stop - part.start <= numel // num_classes + 64 for part in found)


# --- in models


MODELS: dict[str, Callable[[], nn.Module]] = {
    "shipped": SHIPPED["tied"],
    **{f"transformers {name}": make for name, make in TRANSFORMERS.items()},
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
@pytest.mark.full(2)
def test_the_head_gives_the_loss(make: Callable[[], nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PART_NUMEL", 64)
    torch.manual_seed(0)
    model, batch = make().double(), token_batch(0)
    expected = CROSS_ENTROPY.total(model, batch)
    expected.backward()
    before = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    logits = model(batch[0])
    install_loss_head(model)
    assert loss_head_of(model) is not None
    total = CROSS_ENTROPY.total(model, batch)
    total.backward()
    assert float(total.detach()) == pytest.approx(float(expected.detach()), rel=1e-12)
    largest = max(float(gradient.abs().max()) for gradient in before.values())
    for name, parameter in model.named_parameters():
        if name in before:
            assert parameter.grad is not None
            assert float((parameter.grad - before[name]).abs().max()) <= 1e-12 * largest, name
    again = model(batch[0])  # without labels, logits
    assert torch.equal(*(getattr(one, "logits", one) for one in (logits, again)))


class Capped(nn.Module):
    """A model that does something to its logits."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.embedding = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 8)])
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Any:
        hidden = self.blocks[0](self.embedding(tokens))
        logits = self.head(hidden)
        if self.way == "capped":
            return torch.tanh(logits)
        if self.way == "looked at":
            return logits, logits.logsumexp(-1)
        return logits if self.way == "plain" else logits + self.head(hidden)


@pytest.mark.parametrize("way", ["capped", "looked at", "twice"])
def test_logits_that_are_used_stay_whole(way: str) -> None:
    model = Capped(way)
    install_loss_head(model)
    assert loss_head_of(model) is None


@pytest.mark.parametrize("way", ["as made", "hook", "hook of the head", "forward", "subclass"])
@pytest.mark.parametrize("make", SHIPPED.values(), ids=SHIPPED.keys())
@pytest.mark.sampled(2)
@pytest.mark.full(4)
def test_shipped_models_are_not_asked_unless_they_were_changed(make: Callable[[], nn.Module], way: str) -> None:
    model: Any = make()
    if way == "hook":
        model.register_forward_hook(lambda _, __, logits: torch.tanh(logits))
    elif way == "hook of the head":
        model.lm_head.register_forward_hook(lambda _, __, logits: torch.tanh(logits))
    elif way == "forward":
        inner = model.forward
        model.forward = lambda *arguments: torch.tanh(inner(*arguments))
    elif way == "subclass":
        of_class = type(model).forward
        model.__class__ = type("Subclass", (type(model),), {"forward": lambda *given: torch.tanh(of_class(*given))})
    install_loss_head(model)
    assert (loss_head_of(model) is not None) == (way == "as made")


@pytest.mark.parametrize("make", SHIPPED.values(), ids=SHIPPED.keys())
def test_shipped_models_would_answer_the_same(make: Callable[[], nn.Module]) -> None:
    model: Any = make()
    model.__class__ = type("Subclass", (type(model),), {})  # which weft does not know, so it runs the model
    install_loss_head(model)
    head = loss_head_of(model)
    assert head is not None
    assert head.module is model.lm_head


@pytest.mark.parametrize("label", [-1, -101, 37, 2**40])
@pytest.mark.parametrize("way", ["logits", "head", "compiled rows"])
def test_a_label_that_is_no_class_gives_no_number(way: str, label: int) -> None:
    """-1 became class 0, and a label behind the last class read another row."""
    hidden, weight, _, labels = example()
    for unknown in (IGNORE, label):
        labels[1, 7] = unknown
        if way == "logits":
            total = token_loss(F.linear(hidden, weight), labels)[0]
        else:
            rows = rows_loss if way == "head" else torch.compile(rows_loss, backend="eager")
            total = head_loss(hidden, weight, None, labels, 0.0, rows)
        found = [total.detach(), *gradients(total, hidden, weight)]
        assert [bool(one.isnan().any()) for one in found] == [unknown == label] * 3
    assert count_unknown(labels, 37) == (
        f"1 of 150 labels are none of the model's 37 classes, {label} first; "
        "use 0 to 36, or -100 for what does not count"
    )
    assert count_unknown(labels.clamp(0, 36), 37) is None


def test_labels_for_other_positions_are_refused() -> None:
    model = Capped("plain")
    install_loss_head(model)
    with pytest.raises(PlanError, match=r"given \[2, 5\] positions, and there are labels for \[2, 4\]"):
        CROSS_ENTROPY.total(model, (torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 4, dtype=torch.long)))
    assert model(torch.zeros(2, 5, dtype=torch.long)).shape == (2, 5, 11)  # the labels are gone


def test_plans_that_have_a_loss_of_their_own() -> None:
    assert is_loss_in_head(Plan(data=2, pipe=Pipe(2)))
    assert not is_loss_in_head(Plan(tensor=TensorPlan(2)))


def test_a_profile_counts_the_same_work_and_less_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "PART_NUMEL", 64)
    tokens, found = torch.zeros(16, 16, dtype=torch.long), []
    for in_head in (False, True):
        model = SHIPPED["window"]()
        if in_head:
            install_loss_head(model)
        found.append(profile(model, lambda: (tokens,), ExampleLoss(lambda: tokens)))
    whole, part = found
    assert (part.flops, part.backward_flops, part.units) == (whole.flops, whole.backward_flops, whole.units)
    assert part.layers["lm_head"].out_features == whole.layers["lm_head"].out_features
    assert part.layers["lm_head"].rows == whole.layers["lm_head"].rows == 256


def test_z_loss_is_no_part_of_what_is_measured() -> None:
    torch.manual_seed(0)
    model, batch = MODELS["shipped"]().double(), token_batch(0)
    install_loss_head(model)
    objective = with_z_loss(0.1)
    assert objective.measure is not None
    assert float(objective.measure(model, batch)[0].detach()) == float(CROSS_ENTROPY.total(model, batch).detach())
    assert float(objective.total(model, batch).detach()) > float(CROSS_ENTROPY.total(model, batch).detach()) + 1
