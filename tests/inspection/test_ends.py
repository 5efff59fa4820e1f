"""Ends of the chain of blocks: which models have nothing between it and the embedding or the head, and the guard."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tensor_for_tests as shared
import torch
from tensor_for_tests import SHIPPED, TRANSFORMERS, WIDTH
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.chain_ends import ChainEnds
from weft.inspection.pairing import pair
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.parallel.apply import parallelize
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan
from weft.proof.prove import verify

pytestmark = pytest.mark.processes

PLAN = Plan(tensor=TensorPlan(2, sequence=True))
DECODER = ChainEnds("model.embed_tokens", "model.norm", "lm_head")


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        *((SHIPPED[name], DECODER) for name in ("tied", "one key head", "window")),
        *((TRANSFORMERS[kind], DECODER) for kind in ("Llama", "Mistral", "Qwen2")),
        # Positions are added to the embedding; transformers' gives its last hidden states the shape of the tokens.
        (SHIPPED["gpt2"], ChainEnds(None, "transformer.ln_f", "lm_head")),
        (TRANSFORMERS["GPT2"], ChainEnds()),
        (shared.ViT, ChainEnds()),
        (shared.chain, ChainEnds()),
    ],
)
def test_ends_of_known_models(make: Callable[[], nn.Module], expected: ChainEnds) -> None:
    model = make().eval()
    assert pair(model).ends == expected
    assert not any(module.training for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Plain(nn.Module):
    """An embedding, blocks, a norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(shared.VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(shared.Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, shared.VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(self.end(self.chain(self.begin(tokens))))
        return logits

    def begin(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.embed(tokens)
        return out

    def chain(self, hidden: Tensor) -> Tensor:
        for layer in self.layers:
            hidden = layer(hidden)
        return hidden

    def end(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.norm(hidden)
        return out


class Scaled(Plain):
    def begin(self, tokens: Tensor) -> Tensor:
        return super().begin(tokens) * 4.0


class ScaledInPlace(Plain):
    def begin(self, tokens: Tensor) -> Tensor:
        return super().begin(tokens).mul_(4.0)


class Dropping(Plain):
    def begin(self, tokens: Tensor) -> Tensor:
        return nn.functional.dropout(super().begin(tokens), 0.5, self.training)


class Twice(Plain):
    def begin(self, tokens: Tensor) -> Tensor:
        self.embed(tokens.flip(1))
        return super().begin(tokens)


class Skipping(Plain):
    def chain(self, hidden: Tensor) -> Tensor:
        return super().chain(hidden) + 0.1 * hidden


class WithoutNorm(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.Identity()  # type: ignore[assignment]


class LastToken(Plain):
    def end(self, hidden: Tensor) -> Tensor:
        return super().end(hidden[:, -1:])


class Reshaping(Plain):
    def forward(self, tokens: Tensor) -> Tensor:
        logits: Tensor = self.head(super().end(self.chain(self.begin(tokens))).view(*tokens.shape, -1))
        return logits


class NormTwice(Plain):
    def end(self, hidden: Tensor) -> Tensor:
        return super().end(super().end(hidden))


class Mixing(Plain):
    """A norm that is none of each token."""

    class RMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(WIDTH))

        def forward(self, hidden: Tensor) -> Tensor:
            return self.weight * hidden * torch.rsqrt(hidden.square().mean((1, 2), keepdim=True) + 1e-6)

    def __init__(self) -> None:
        super().__init__()
        self.norm = self.RMSNorm()  # type: ignore[assignment]


class HandingOn(Plain):
    """Returns its last hidden states beside the logits."""

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        hidden = self.end(self.chain(self.begin(tokens)))
        return self.head(hidden), hidden


class Failing(Plain):
    def forward(self, tokens: Tensor, *, needed: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens) + needed


BEGIN, END = ChainEnds("embed"), ChainEnds(None, "norm", "head")
EITHER = [(Scaled, END), (ScaledInPlace, END), (Dropping, END), (Twice, END), (Skipping, ChainEnds())]
EITHER += [(LastToken, BEGIN), (Reshaping, BEGIN), (NormTwice, BEGIN), (Mixing, BEGIN)]
RUNNING: list[tuple[type[Plain], ChainEnds]] = [
    (Plain, ChainEnds("embed", "norm", "head")),
    (WithoutNorm, ChainEnds("embed", None, "head")),
    *EITHER,
]


@pytest.mark.parametrize(("kind", "expected"), [*RUNNING, (HandingOn, BEGIN), (Failing, ChainEnds())])
def test_what_stands_between_is_seen(kind: type[Plain], expected: ChainEnds) -> None:
    assert pair(kind()).ends == expected


@pytest.mark.parametrize("kind", [Plain, WithoutNorm, Skipping, Scaled, LastToken, Mixing])
@pytest.mark.sampled(2)
def test_both_ways_compute_the_same(kind: type[Plain]) -> None:
    def batch(step: int) -> tuple[Tensor, Tensor]:
        tokens, labels = shared.token_batch(step)
        return tokens, labels[:, -1:] if kind is LastToken else labels

    verify(kind, batch, PLAN, steps=2).require()


def test_a_call_that_takes_another_way_is_refused() -> None:
    def rank(index: int) -> list[str]:
        tokens, errors = shared.token_batch(0)[0], []
        model = parallelize(TRANSFORMERS["Llama"](), PLAN, Mesh(PLAN))
        calls = [lambda: model(tokens, logits_to_keep=1), lambda: model(inputs_embeds=torch.zeros(2, 8, WIDTH))]
        for call in calls:
            with pytest.raises(PlanError) as error:
                call()
            errors.append(str(error.value))
        assert model(tokens).logits.isfinite().all()  # what failed has left nothing behind
        return errors

    for part, whole in run_local(rank, 2):
        assert part == (
            "'lm_head' got [8, 1, 16], which is not what the module before it gave (of the split sequence, "
            "[8, 4, 16]), although it was when weft tried the model; call the model with its tokens alone, or use "
            "tensor.sequence = false"
        )
        assert whole.startswith("the first block got [2, 8, 16], which is not what the module before it gave")
