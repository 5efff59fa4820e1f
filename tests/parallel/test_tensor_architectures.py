"""The axis x on unedited models: what is split by pairs, gathered or left whole, each proved in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from architectures_for_tests import ARCHITECTURES, BATCHES, VOCABULARY, WIDTH, token_batch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.pairing import pair
from weft.plan import Memory, Plan
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import verify

pytestmark = pytest.mark.processes
X2 = Plan(tensor=TensorPlan(2))
# Pairs, gathered layers, and modules that are left whole.
EXPECTED: dict[str, tuple[int, int, int]] = {
    "Gemma 2": (4, 0, 0),
    "OPT": (4, 0, 0),
    "GPT-NeoX": (4, 0, 0),
    "Phi-3": (4, 0, 0),
    "Falcon": (4, 0, 0),
    "BLOOM": (0, 8, 0),
    "BERT": (0, 13, 0),
    "T5": (6, 8, 0),
    "BART": (10, 1, 0),
    "Whisper": (10, 2, 1),
    "Swin": (8, 2, 0),
    "ConvNeXt": (0, 10, 4),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.sampled(3)
def test_transformers_models(name: str) -> None:
    make = ARCHITECTURES[name]
    found = pair(make())
    kinds = Counter(split.kind for split in found.splits.values())
    assert (kinds["row"], kinds["gathered"], len(found.kept)) == EXPECTED[name]
    verify(make, BATCHES.get(name, token_batch), X2, steps=2).require()


@pytest.mark.parametrize("name", ["OPT", "BERT"])
def test_beside_recompute(name: str) -> None:
    plan = Plan(tensor=TensorPlan(2), memory=Memory(recompute="full"))
    verify(ARCHITECTURES[name], token_batch, plan, steps=2).require()


# --- habits of a user's own model


class Own(nn.Module):
    """A language model with something in its middle."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.embed, self.middle = nn.Embedding(VOCABULARY, WIDTH), middle
        self.pair = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.middle(self.embed(tokens))
        hidden = hidden[0] if isinstance(hidden, tuple) else hidden
        out: Tensor = self.head(self.pair(hidden))
        return out


class Biased(nn.Module):
    """A language model that holds the bias of its logits itself."""

    def __init__(self, is_tied: bool, is_added: bool) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.linspace(-1, 1, VOCABULARY))
        self.model, self.is_added = Own(nn.Identity()), is_added
        if is_tied:  # as in BERT: the bias is known by the name that is registered first
            self.model.head.bias = self.bias

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.model(tokens)
        return logits + self.bias if self.is_added else logits


class Channels(nn.Module):
    """A depthwise convolution along the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.convolution(hidden.transpose(1, 2)).transpose(1, 2)
        return out


class Matrix(nn.Module):
    """A matrix outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.matrix


class Attention(nn.Module):
    """torch's attention to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return out


class Twice(nn.Module):
    """One linear that is called twice, and one that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.again, self.unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.again(torch.tanh(self.again(hidden)))
        return out


def lstm() -> nn.Module:
    """Two layers of an LSTM."""
    return nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)


def encoder_layer() -> nn.Module:
    """torch's encoder layer, which in an evaluation reads the weights of its linears itself."""
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("middle", [lstm, Channels, Matrix, Attention, encoder_layer, Twice])
def test_what_is_left_whole_is_exact(middle: Callable[[], nn.Module]) -> None:
    verify(lambda: Own(middle()), token_batch, X2, steps=2).require()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("is_tied", "is_added"), [(True, False), (False, True)])
def test_a_bias_that_the_root_holds(is_tied: bool, is_added: bool) -> None:
    verify(lambda: Biased(is_tied, is_added), token_batch, X2, steps=2).require()


def test_a_weight_that_is_read_outside_of_its_layer_is_refused() -> None:
    reason = r"'bias' is used outside of the forward of 'model.head', where x would give a part of it"
    with pytest.raises(PlanError, match=reason):
        verify(lambda: Biased(is_tied=True, is_added=True), token_batch, X2)


def test_a_model_of_which_nothing_can_be_split_is_refused() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.LSTM(VOCABULARY, VOCABULARY, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            given = nn.functional.one_hot(tokens, VOCABULARY).double()
            out: Tensor = self.cell(given)[0]
            return out

    with pytest.raises(PlanError, match=r"has none that can be split \('cell.weight_ih_l0' is left whole: a matrix of"):
        verify(Recurrent, token_batch, X2)


@pytest.mark.parametrize("name", ["BERT", "BLOOM"])
def test_attention_that_is_gathered_needs_whole_sequences(name: str) -> None:
    with pytest.raises(PlanError, match=r"tensor.sequence = true gives what x does not split a part of each sequence"):
        verify(ARCHITECTURES[name], token_batch, Plan(tensor=TensorPlan(2, sequence=True)))


def test_what_is_left_whole_does_not_go_with_y() -> None:
    with pytest.raises(PlanError, match=r"tensor.y = 2 splits the features between layers, but not all layers can be"):
        verify(lambda: Own(Matrix()), token_batch, Plan(tensor=TensorPlan(1, 2)))
