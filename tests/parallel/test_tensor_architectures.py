"""The axis x on unedited models: what is split by pairs, gathered or left whole, each proved in float64."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures_for_tests import ARCHITECTURES, BATCHES, VOCABULARY, WIDTH, token_batch
from nets_for_tests import net
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


def own(middle: nn.Module) -> nn.Module:
    """A language model with something in its middle."""

    def forward(self: Any, tokens: Tensor) -> Tensor:
        hidden = self.middle(self.embed(tokens))
        return self.head(self.pair(hidden[0] if isinstance(hidden, tuple) else hidden))

    pair_of = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, WIDTH))
    ends = {"embed": nn.Embedding(VOCABULARY, WIDTH), "pair": pair_of, "head": nn.Linear(WIDTH, VOCABULARY)}
    return net(forward, middle=middle, **ends)


def biased(is_tied: bool, is_added: bool) -> nn.Module:
    """A language model that holds the bias of its logits itself."""
    bias, model = nn.Parameter(torch.linspace(-1, 1, VOCABULARY)), own(nn.Identity())
    if is_tied:  # as in BERT: the bias is known by the name that is registered first
        model.head.bias = bias

    def forward(self: Any, tokens: Tensor) -> Tensor:
        return self.model(tokens) + self.bias if is_added else self.model(tokens)

    return net(forward, bias=bias, model=model)


def channels() -> nn.Module:
    """A depthwise convolution along the sequence."""
    convolution = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=WIDTH)
    return net(lambda self, hidden: self.convolution(hidden.transpose(1, 2)).transpose(1, 2), convolution=convolution)


def matrix() -> nn.Module:
    """A matrix outside any layer."""
    return net(lambda self, hidden: hidden @ self.matrix, matrix=nn.Parameter(torch.randn(WIDTH, WIDTH)))


def attention() -> nn.Module:
    """torch's attention to itself."""
    layer = nn.MultiheadAttention(WIDTH, 4, batch_first=True)
    return net(lambda self, hidden: self.layer(hidden, hidden, hidden, need_weights=False)[0], layer=layer)


def twice() -> nn.Module:
    """One linear that is called twice, and one that is never called."""
    again, unused = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    return net(lambda self, hidden: self.again(torch.tanh(self.again(hidden))), again=again, unused=unused)


def lstm() -> nn.Module:
    """Two layers of an LSTM."""
    return nn.LSTM(WIDTH, WIDTH, 2, batch_first=True)


def encoder_layer() -> nn.Module:
    """torch's encoder layer, which in an evaluation reads the weights of its linears itself."""
    return nn.TransformerEncoderLayer(WIDTH, 4, 24, dropout=0.0, batch_first=True)


@pytest.mark.parametrize("middle", [lstm, channels, matrix, attention, encoder_layer, twice])
def test_what_is_left_whole_is_exact(middle: Callable[[], nn.Module]) -> None:
    verify(lambda: own(middle()), token_batch, X2, steps=2).require()


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("is_tied", "is_added"), [(True, False), (False, True)])
def test_a_bias_that_the_root_holds(is_tied: bool, is_added: bool) -> None:
    verify(lambda: biased(is_tied, is_added), token_batch, X2, steps=2).require()


def test_a_weight_that_is_read_outside_of_its_layer_is_refused() -> None:
    reason = r"'bias' is used outside of the forward of 'model.head', where x would give a part of it"
    with pytest.raises(PlanError, match=reason):
        verify(lambda: biased(is_tied=True, is_added=True), token_batch, X2)


def test_a_model_of_which_nothing_can_be_split_is_refused() -> None:
    def recurrent() -> nn.Module:
        def forward(self: Any, tokens: Tensor) -> Tensor:
            return self.cell(nn.functional.one_hot(tokens, VOCABULARY).double())[0]

        return net(forward, cell=nn.LSTM(VOCABULARY, VOCABULARY, batch_first=True))

    with pytest.raises(PlanError, match=r"has none that can be split \('cell.weight_ih_l0' is left whole: a matrix of"):
        verify(recurrent, token_batch, X2)


@pytest.mark.parametrize("name", ["BERT", "BLOOM"])
def test_attention_that_is_gathered_needs_whole_sequences(name: str) -> None:
    with pytest.raises(PlanError, match=r"tensor.sequence = true gives what x does not split a part of each sequence"):
        verify(ARCHITECTURES[name], token_batch, Plan(tensor=TensorPlan(2, sequence=True)))


def test_what_is_left_whole_does_not_go_with_y() -> None:
    with pytest.raises(PlanError, match=r"tensor.y = 2 splits the features between layers, but not all layers can be"):
        verify(lambda: own(matrix()), token_batch, Plan(tensor=TensorPlan(1, 2)))
