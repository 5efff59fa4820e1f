"""Tiny models that stress the parallel core: odd sizes, ties, sharing, frozen parts, and outputs of many kinds.

Sizes are primes wherever a model allows it, so that nothing divides by a degree or by the alignment. Every batch is
(inputs, labels) of eight sequences, with label masks that differ from sample to sample, one sample masked wholly.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from weft.models import GPT2, IGNORE, Decoder, DecoderConfig, GPT2Config
from weft.models.loss import token_loss
from weft.plan import Plan
from weft.proof.prove import ProofReport, verify
from weft.step.objective import CROSS_ENTROPY, Objective

VOCABULARY, SEQUENCE, BATCH, WIDTH = 61, 7, 8, 13


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and shifted labels [8, 7]; sample i has its first i % 5 labels masked, and sample 3 all of them."""
    generator = torch.Generator().manual_seed(100 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(BATCH):
        labels[sample, : sample % 5] = IGNORE
    labels[3] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def vector_batch(step: int) -> tuple[Tensor, Tensor]:
    """Vectors [8, 13] and one class each, two samples masked."""
    generator = torch.Generator().manual_seed(200 + step)
    inputs = torch.randn(BATCH, WIDTH, generator=generator)
    labels = torch.randint(0, 5, (BATCH,), generator=generator)
    labels[[1, 6]] = IGNORE
    return inputs, labels


# --- the models that weft ships, shrunk


def small_config(width: int, inner: int, layers: int, heads: int, keys: int, **more: Any) -> DecoderConfig:
    """A small decoder, of `keys` heads of keys and values."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": keys}
    return DecoderConfig(**{"vocab_size": VOCABULARY, **sizes, **heads_of, **more})


def tied_decoder() -> nn.Module:
    """Grouped-query attention, tied head, no size that divides by eight."""
    return Decoder(small_config(width=12, inner=19, layers=3, heads=2, keys=1, tie_word_embeddings=True))


def qwen_decoder() -> nn.Module:
    """Qwen2: biases on q, k and v, untied."""
    return Decoder(small_config(architecture="qwen2", width=12, inner=19, layers=2, heads=2, keys=2))


def gpt2() -> nn.Module:
    """Tied, with biases and learned positions."""
    return GPT2(GPT2Config(vocab_size=VOCABULARY, n_positions=11, n_embd=10, n_layer=2, n_head=2))


def dropout_gpt2() -> nn.Module:
    """GPT-2 with dropout in every place that has one."""
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=11, n_embd=10, n_layer=2, n_head=2, resid_pdrop=0.3, embd_pdrop=0.2,
        attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2(config)


# --- frozen parts


def frozen(make: Callable[[], nn.Module], *prefixes: str) -> Callable[[], nn.Module]:
    """The same model with every parameter frozen whose name starts with one of the prefixes."""

    def made() -> nn.Module:
        model = make()
        names = [name for name, _ in model.named_parameters() if name.startswith(prefixes)]
        assert names, prefixes
        for name in names:
            model.get_parameter(name).requires_grad_(False)
        return model

    return made


frozen_parameter = frozen(tied_decoder, "model.layers.1.mlp.up_proj.weight")
frozen_middle = frozen(tied_decoder, "model.layers.1.")
frozen_first = frozen(tied_decoder, "model.embed_tokens", "model.layers.0.")
frozen_root = frozen(gpt2, "transformer.wte", "transformer.wpe", "transformer.ln_f")


class Adapted(nn.Module):
    """LoRA: a frozen matrix beside two small trained ones. In backward the trained ones are done first."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, 3, bias=False)
        self.up = nn.Linear(3, WIDTH, bias=False)
        self.base.requires_grad_(False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.base(hidden) + self.up(self.down(hidden)))
        return out


class AdapterChain(nn.Module):
    """Three LoRA blocks behind a trained input layer, so that gradients must pass the frozen matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Adapted() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.enter(inputs)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class FrozenHeads(AdapterChain):
    """Each block is frozen but for a layer behind the frozen one: its gradients are all there halfway through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, 17), nn.Tanh(), nn.Linear(17, WIDTH)) for _ in "abc")
        for layer in self.layers:
            layer.get_submodule("0").requires_grad_(False)


# --- users' own models


class MLP(nn.Module):
    """No chain of blocks: everything is the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 11)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.second = nn.Linear(11, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.second(self.scale * torch.relu(self.first(inputs)))
        return out


def sequential() -> nn.Module:
    """No root: every parameter is a block's; blocks without parameters and an in-place operation between."""
    return nn.Sequential(
        nn.Linear(WIDTH, 11), nn.ReLU(inplace=True), nn.Linear(11, 7), nn.LayerNorm(7), nn.Linear(7, 5)
    )


class CalledTwice(nn.Module):
    """Weight sharing over depth: block, other block, first block again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        first, second = self.layers
        hidden = torch.tanh(first(inputs))
        hidden = torch.tanh(second(hidden))
        hidden = torch.tanh(first(hidden))
        out: Tensor = self.head(hidden)
        return out


class FrozenCalledTwice(nn.Module):
    """A frozen block that is fed its own output, behind a trained one."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.layers[1].requires_grad_(False)
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        trained, fixed = self.layers
        out: Tensor = self.head(fixed(fixed(trained(inputs))))
        return out


class SharedModule(nn.Module):
    """Two blocks that hold the same inner module, as ALBERT-like and Zamba-like models do."""

    def __init__(self) -> None:
        super().__init__()
        shared = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(WithShared(shared) for _ in range(2))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = inputs
        for layer in self.layers:
            hidden = layer(hidden)
        out: Tensor = self.head(hidden)
        return out


class WithShared(nn.Module):
    """A block with a matrix of its own and one that others hold too."""

    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.own = nn.Linear(WIDTH, WIDTH)
        self.shared = shared

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = torch.tanh(self.own(hidden)) + self.shared(hidden)
        return out


class SharedParameter(SharedModule):
    """Two blocks that share one parameter, not a module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(WithShared(nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.layers[1].get_submodule("own").weight = self.layers[0].get_parameter("own.weight")


class Unused(MLP):
    """A parameter that no forward touches."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Parameter(torch.ones(3))


@dataclass
class Output:
    """What a dataclass-returning model returns."""

    logits: Tensor
    note: str = "not a tensor"


class StructuredBlock(nn.Module):
    """Takes a keyword, returns a dict that also carries its input along."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, *, state: dict[str, Tensor], scale: float) -> dict[str, Tensor]:
        hidden = state["hidden"]
        return {"hidden": torch.tanh(self.linear(hidden)) * scale, "residual": hidden}


class Structured(nn.Module):
    """Blocks with keyword arguments that hand dicts to each other; the model returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(StructuredBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, inputs: Tensor) -> Output:
        state = {"hidden": self.enter(inputs), "residual": inputs}
        for block in self.blocks:
            state = block(state=state, scale=0.5)
        return Output(self.head(state["hidden"] + state["residual"]))


class Named(nn.Module):
    """Blocks in a ModuleDict: no chain is found, so all of them are the root's."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"enter": nn.Linear(WIDTH, 11), "leave": nn.Linear(11, 5)})

    def forward(self, inputs: Tensor) -> dict[str, Any]:
        return {"logits": self.parts["leave"](torch.tanh(self.parts["enter"](inputs)))}


# --- transformers, unchanged


def hf_llama() -> nn.Module:
    """LlamaForCausalLM, tied, grouped-query."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**_hf_sizes(), tie_word_embeddings=True))


def hf_qwen2() -> nn.Module:
    """Qwen2ForCausalLM, untied, with biases."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    return Qwen2ForCausalLM(Qwen2Config(**_hf_sizes(), tie_word_embeddings=False))


def hf_gpt2() -> nn.Module:
    """GPT2LMHeadModel: tied, transposed projections, without dropout."""
    from transformers import GPT2Config as Config
    from transformers import GPT2LMHeadModel

    return GPT2LMHeadModel(
        Config(
            vocab_size=VOCABULARY, n_positions=11, n_embd=10, n_layer=2, n_head=2, resid_pdrop=0.0, embd_pdrop=0.0,
            attn_pdrop=0.0, use_cache=False,
        )
    )  # fmt: skip


def _hf_sizes() -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY, "hidden_size": 12, "intermediate_size": 19, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 16, "use_cache": False,
    }  # fmt: skip


TOKEN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "tied decoder": tied_decoder,
    "qwen decoder": qwen_decoder,
    "gpt2": gpt2,
    "frozen parameter": frozen_parameter,
    "frozen middle block": frozen_middle,
    "frozen first block": frozen_first,
    "frozen root": frozen_root,
    "transformers llama": hf_llama,
    "transformers gpt2": hf_gpt2,
    "transformers qwen2": hf_qwen2,
}
VECTOR_MODELS: dict[str, Callable[[], nn.Module]] = {
    "adapters": AdapterChain,
    "frozen behind trained": FrozenHeads,
    "sequential": sequential,
    "block called twice": CalledTwice,
    "frozen block called twice": FrozenCalledTwice,
    "module in two blocks": SharedModule,
    "parameter in two blocks": SharedParameter,
    "structured": Structured,
}
ROOT_ONLY_MODELS: dict[str, Callable[[], nn.Module]] = {"mlp": MLP, "module dict": Named}
ALL_MODELS = TOKEN_MODELS | VECTOR_MODELS | ROOT_ONLY_MODELS


def _dict_total(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    return token_loss(model(batch[0])["logits"], batch[1])[0]


def check(name: str, plan: Plan, clip: float | None = 1.0) -> ProofReport:
    """Verify the named model under a plan."""
    objective = Objective(CROSS_ENTROPY.count, _dict_total) if name == "module dict" else CROSS_ENTROPY
    batch = token_batch if name in TOKEN_MODELS else vector_batch
    return verify(ALL_MODELS[name], batch, plan, objective=objective, clip=clip)
