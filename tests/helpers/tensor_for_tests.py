"""What the tests of the axes x, y and context share: tiny models that eight ranks divide, batches, and measurements."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft.comm.collectives
from weft.comm import Axis, Pending
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import IGNORE, DecoderConfig, GPT2Config, ModelConfig, build, initialise, token_loss
from weft.parallel.apply import cost, parallelize
from weft.parallel.context.axis import own_tokens
from weft.plan import Plan, split_batch
from weft.profiling import profile
from weft.proof.prove import ProofReport, verify
from weft.sharding.layout import COMPUTE_DTYPE, MASTER_DTYPE
from weft.sharding.units import units_of
from weft.step.objective import CROSS_ENTROPY

VOCABULARY, SEQUENCE, BATCH, WIDTH = 61, 8, 8, 16


def token_batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels [8, 8] of which each sample masks another number."""
    generator = torch.Generator().manual_seed(300 + step)
    tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for sample in range(BATCH):
        labels[sample, : sample % 5] = IGNORE
    return tokens[:, :-1].contiguous(), labels


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    """Seven patches of twelve values (eight tokens with the class token), and a class for each of eight images."""
    generator = torch.Generator().manual_seed(400 + step)
    return torch.randn(BATCH, 7, 12, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


def vector_batch(step: int) -> tuple[Tensor, Tensor]:
    """Twelve values and a class each."""
    generator = torch.Generator().manual_seed(500 + step)
    return torch.randn(BATCH, 12, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)


# --- models


def made(config: ModelConfig, *frozen: str) -> Callable[[], nn.Module]:
    """A maker of an initialised model, with parameters frozen whose names start with one of `frozen`."""

    def make() -> nn.Module:
        model = build(config)
        initialise(model, 0)
        for name, parameter in model.named_parameters():
            if frozen and name.startswith(frozen):
                parameter.requires_grad_(False)
        return model

    return make


def decoder(**others: Any) -> DecoderConfig:
    """Eight heads of two features."""
    sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
    return DecoderConfig(**{**sizes, "num_attention_heads": 8, **others})


SHIPPED: dict[str, Callable[[], nn.Module]] = {
    "tied": made(decoder(num_key_value_heads=4, tie_word_embeddings=True)),
    "biased": made(decoder(attention_bias=True, mlp_bias=True)),
    "one key head": made(decoder(architecture="qwen3", num_key_value_heads=1)),
    "two key heads": made(decoder(architecture="qwen2", num_key_value_heads=2, num_hidden_layers=3)),
    "window": made(decoder(architecture="mistral", sliding_window=3)),
    "gpt2": made(GPT2Config(vocab_size=VOCABULARY, n_positions=11, n_embd=WIDTH, n_layer=2, n_head=8)),
}


def transformers_model(kind: str) -> Callable[[], nn.Module]:
    """A maker of transformers' own model."""

    def make() -> nn.Module:
        import transformers

        if kind == "GPT2":
            sizes: dict[str, Any] = {"vocab_size": VOCABULARY, "n_positions": 16, "n_embd": WIDTH, "n_layer": 2}
            sizes |= {"n_head": 8, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
            dropouts: dict[str, Any] = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **dropouts))
        sizes = {"vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 24, "num_hidden_layers": 2}
        heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 32}
        special: dict[str, Any] = {"sliding_window": None} if kind == "Mistral" else {}
        special |= {"attention_bias": True, "tie_word_embeddings": True} if kind == "Llama" else {}
        config = getattr(transformers, f"{kind}Config")(**sizes, **heads, **special, use_cache=False)
        return getattr(transformers, f"{kind}ForCausalLM")(config)

    return make


TRANSFORMERS = {kind: transformers_model(kind) for kind in ("Llama", "Mistral", "Qwen2", "GPT2")}


def exact_norm(self: Any, hidden: Tensor) -> Tensor:
    """transformers' RMSNorm without its cast to float32, so that float64 stays float64."""
    return self.weight * (hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + self.variance_epsilon))


def with_exact_norms(monkeypatch: Any) -> None:
    """Let transformers' norms compute in the dtype they are given."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm
    from transformers.models.mistral.modeling_mistral import MistralRMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    for norm in (LlamaRMSNorm, MistralRMSNorm, Qwen2RMSNorm):
        monkeypatch.setattr(norm, "forward", exact_norm)


class Attention(nn.Module):
    """A user's own: fused, with a norm first, a norm of each head, a scale and a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.head_dim = 8, 2
        self.norm, self.head_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(2)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.7))

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.num_heads, self.head_dim))
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self.head_norm(query), key, value)
        return hidden + self.gamma * self.proj(mixed.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    """Two linears with a learned number between them."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(hidden)) * self.scale)


class Layer(nn.Module):
    """Attention, an MLP and a lone linear."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.norm, self.mlp = Attention(), nn.LayerNorm(WIDTH), MLP()
        self.lone = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = self.attention(hidden)
        hidden = hidden + torch.tanh(self.lone(hidden))
        return hidden + self.mlp(self.norm(hidden))


class ViT(nn.Module):
    """A plain vision transformer, as one writes it oneself."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Linear(12, WIDTH)
        self.token = nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.positions = nn.Parameter(torch.linspace(-1, 1, 8 * WIDTH).view(1, 8, WIDTH))
        self.blocks = nn.ModuleList(Layer() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)

    def forward(self, patches: Tensor) -> Tensor:
        hidden = torch.cat([self.token.expand(len(patches), -1, -1), self.patch(patches)], 1) + self.positions
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden)[:, 0])


def chain() -> nn.Module:
    """A plain MLP, whose linears are its blocks."""
    sizes = (12, 24, 16, 8, 5)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


OWN: dict[str, Callable[[], nn.Module]] = {"vit": ViT, "chain": chain}
ALL = SHIPPED | TRANSFORMERS | OWN


def check(
    name: str, plan: Plan, clip: float | None = 1.0, make: Callable[[], nn.Module] | None = None, steps: int = 2
) -> ProofReport:
    """Verify the named model under a plan."""
    batch = {"vit": image_batch, "chain": vector_batch}.get(name, token_batch)
    return verify(make or ALL[name], batch, plan, clip=clip, steps=steps)


def failures(report: ProofReport) -> set[str]:
    """What the report found wrong."""
    return {line.what for line in report.checks if not line.passed}


def counted(axis: Axis, operation: str, whole: Tensor) -> Pending:
    """Enter a call in the ledger and do nothing."""
    if axis.degree > 1:
        weft.comm.collectives.record(axis, operation, whole)
    return Pending(None, axis, operation)


# --- saved bytes


def measured_saved_bytes(config: ModelConfig, plan: Plan, batch: int, sequence: int) -> list[int]:
    """What autograd saves in one forward and loss on each rank, parameters and buffers aside."""
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    return saved_bytes_of_ranks(made(config), plan, (tokens, tokens))


def saved_bytes_of_ranks(
    make: Callable[[], nn.Module],
    plan: Plan,
    given: tuple[Tensor, Tensor],
    change: Callable[[nn.Module], None] = lambda model: None,
) -> list[int]:
    """The same for any model of tokens; `change` is done to the parallel one."""

    def rank(index: int) -> int:
        mesh = Mesh(plan)
        torch.manual_seed(0)
        model = parallelize(make().to(MASTER_DTYPE[plan.precision]), plan, mesh)
        change(model)
        own = own_tokens(given, mesh["context"])
        units = units_of(model)
        state = [flat.whole for flat in units.flats] if units is not None else [*model.parameters()]
        return saved_bytes(state, lambda: CROSS_ENTROPY.total(model, own))

    return run_local(rank, plan.num_ranks, 120)


def saved_bytes(ignored: Iterable[Tensor], compute: Callable[[], object]) -> int:
    """What `compute` keeps for backward, but for some tensors; storages count once."""
    known = {tensor.untyped_storage()._cdata for tensor in ignored}
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in known:
            saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in saved.values())


def predicted_saved_bytes(config: ModelConfig, plan: Plan, batch: int, sequence: int) -> int:
    """The same, before anything runs."""

    def tokens() -> Tensor:
        return torch.zeros(batch, sequence, dtype=torch.long)

    model = made(config)().to(COMPUTE_DTYPE[plan.precision])
    found = profile(model, lambda: (tokens(),), lambda logits: token_loss(logits, tokens()))
    return cost(found, plan, split_batch(plan, batch * plan.num_batch_ranks, sequence)).saved_bytes
