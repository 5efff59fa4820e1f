"""Which linears pair up, and why others do not: a split is proved by parts that add up, never by names alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from images_for_tests import Text, group_resnet
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.live_bytes import LiveTensors
from weft.inspection.pairing import pair
from weft.inspection.parameter_cut import Cut, share, share_units, stack_intervals
from weft.inspection.split_probe import MAX_PROBED_WIDTH, is_feature_wise, is_linear
from weft.inspection.tensor_splits import Pairing, SplitPart, is_norm
from weft.models import GPT2, Decoder, DecoderConfig, GPT2Config
from weft.parallel.tensor.cuts import parameter_cuts
from weft.parallel.tensor.norm import is_plain_norm
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan

WIDTH = 16


class Attention(nn.Module):
    """A user's attention, with every habit that matters as an option."""

    def __init__(self, *habits: str, heads: int = 4) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.habits = heads, WIDTH // heads, habits
        self.qkv = nn.Linear(WIDTH, 3 * heads * self.head_dim)
        self.proj = nn.Linear(heads * self.head_dim, WIDTH)
        self.gamma = nn.Parameter(torch.randn(WIDTH)) if "layer scale" in habits else None
        self.norm = nn.LayerNorm(WIDTH) if "norm first" in habits else nn.Identity()
        self.head_norm = nn.LayerNorm(self.head_dim) if "head norm" in habits else nn.Identity()
        self.inside = nn.Linear(self.head_dim, self.head_dim) if "linear inside" in habits else nn.Identity()

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, width = hidden.shape
        fused = self.qkv(self.norm(hidden))
        if "interleaved" in self.habits:  # as BLOOM and GPT-NeoX have it
            query, key, value = fused.view(batch, sequence, self.num_heads, 3, self.head_dim).unbind(3)
        else:
            query, key, value = fused.view(batch, sequence, 3, self.num_heads, self.head_dim).unbind(2)
        query = self.inside(self.head_norm(query))
        if "gate by input" in self.habits:
            query = query * hidden.mean(-1, keepdim=True)[..., None]
        mixed = F.scaled_dot_product_attention(*(heads.transpose(1, 2) for heads in (query, key, value)))
        mixed = mixed.transpose(1, 2)
        out: Tensor = self.proj(mixed.reshape(batch, sequence, width if "width of input" in self.habits else -1))
        out = out if self.gamma is None else out * self.gamma
        return hidden + out if "residual" in self.habits else out


class Separate(nn.Module):
    """q, k, v and o, with fewer key heads, counted by its own attributes."""

    def __init__(self, key_heads: int = 2) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads = 4, key_heads
        self.q, self.o = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.k, self.v = nn.Linear(WIDTH, 4 * key_heads), nn.Linear(WIDTH, 4 * key_heads)

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, _ = hidden.shape
        query = self.q(hidden).view(batch, sequence, self.n_heads, 4).transpose(1, 2)
        key, value = (m(hidden).view(batch, sequence, self.n_kv_heads, 4).transpose(1, 2) for m in (self.k, self.v))
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        out: Tensor = self.o(mixed.transpose(1, 2).flatten(2))
        return out


class Mix(nn.Module):
    """Two linears (or three) with something between them."""

    def __init__(self, between: str, first: int = WIDTH, last: int = WIDTH, middle: int = 24) -> None:
        super().__init__()
        self.between = between
        self.fc1, self.fc2 = nn.Linear(first, middle), nn.Linear(middle, last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.per_feature = nn.Parameter(torch.ones(middle)) if between == "per feature" else None

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.fc1(hidden)
        if self.between == "softmax":
            inner = inner.softmax(-1)
        elif self.between == "norm":
            inner = F.layer_norm(inner, inner.shape[-1:])
        elif self.between == "scale":
            inner = F.gelu(inner) * self.scale
        elif self.between == "per feature":
            inner = inner * self.per_feature
        elif self.between == "input":
            inner = inner * hidden.sum(-1, keepdim=True)
        elif self.between == "weight":
            return F.linear(F.gelu(inner), self.fc2.weight, self.fc2.bias)
        elif self.between == "twice":
            inner = inner + F.pad(self.fc2(inner), (0, inner.shape[-1] - self.fc2.out_features))
        out: Tensor = self.fc2(F.gelu(inner))
        return out * self.scale if self.between == "outer scale" else out


class Around(nn.Module):
    """A model of one block with a head."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([inner])
        self.head = nn.Linear(WIDTH, 5)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.head(self.blocks[0](hidden))
        return out


def kinds(inner: nn.Module) -> dict[str, str]:
    """The kind of every linear in the block."""
    return {name[len("blocks.0.") :]: split.kind for name, split in pair(Around(inner)).splits.items() if "0" in name}


# --- what pairs


def test_shipped_decoder() -> None:
    found = pair(Decoder(DecoderConfig(**_sizes(), architecture="qwen3", num_key_value_heads=2)))
    layer = "model.layers.1"
    assert {name[len(layer) + 1 :]: split.kind for name, split in found.splits.items() if name.startswith(layer)} == {
        "self_attn.q_proj": "column",
        "self_attn.k_proj": "column",
        "self_attn.v_proj": "column",
        "self_attn.o_proj": "row",
        "mlp.gate_proj": "column",
        "mlp.up_proj": "column",
        "mlp.down_proj": "row",
    }
    assert found.splits["lm_head"].kind == "head"
    assert found.embeddings == ("model.embed_tokens",)
    assert found.splits[f"{layer}.self_attn.k_proj"].parts == (SplitPart(2, 4, is_key=True),)
    assert found.splits[f"{layer}.mlp.up_proj"].parent == f"{layer}.mlp"  # both enter once
    assert {name.rpartition("layers.")[2] for name in found.inner} == {
        f"{i}.self_attn.{which}_norm.weight" for i in (0, 1) for which in "qk"
    }


def test_shipped_gpt2() -> None:
    found = pair(GPT2(GPT2Config(vocab_size=61, n_positions=8, n_embd=16, n_layer=1, n_head=4)))
    assert {name.rpartition("h.0.")[2]: split.kind for name, split in found.splits.items()} == {
        "attn.c_attn": "column",
        "attn.c_proj": "row",
        "mlp.c_fc": "column",
        "mlp.c_proj": "row",
        "lm_head": "head",
    }
    assert found.splits["transformer.h.0.attn.c_attn"].parts == (SplitPart(4, 4),) * 3
    assert found.embeddings == ("transformer.wte", "transformer.wpe")


@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Qwen3"])
def test_transformers_decoders(kind: str) -> None:
    import transformers

    config = getattr(transformers, f"{kind}Config")(**_sizes(), num_key_value_heads=2, head_dim=4)
    found = pair(getattr(transformers, f"{kind}ForCausalLM")(config))
    assert [split.kind for split in found.splits.values()].count("column") == 10
    assert [split.kind for split in found.splits.values()].count("row") == 4
    assert found.scaled["model.layers.0.self_attn"].num_key_heads == 2


@pytest.mark.parametrize("key_heads", [1, 2, 4])
def test_an_attention_of_ones_own_with_few_key_heads(key_heads: int) -> None:
    found = pair(Around(Separate(key_heads)))
    assert {name[9:]: split.kind for name, split in found.splits.items() if "0" in name} == {
        "q": "column",
        "k": "column",
        "v": "column",
        "o": "row",
    }
    assert found.splits["blocks.0.k"].parts == (SplitPart(key_heads, 4, is_key=True),)
    assert set(found.scaled["blocks.0"].attributes) == {"n_heads", "n_kv_heads"}
    assert found.splits["blocks.0.q"].parent == "blocks.0"


@pytest.mark.parametrize("heads", [2, 3, 4, 16])
def test_fused_attention(heads: int) -> None:
    found = pair(Around(Attention(heads=heads)))
    assert found.splits["blocks.0.qkv"].parts == (SplitPart(heads, WIDTH // heads),) * 3
    assert found.inner == frozenset()


def test_a_single_fused_head_is_gathered() -> None:
    assert kinds(Attention(heads=1)) == {"qkv": "gathered", "proj": "gathered"}


def test_fused_attention_with_q_k_and_v_next_to_each_other_for_each_head() -> None:
    found = pair(Around(Attention("interleaved")))  # as GPT-NeoX has it
    assert found.splits["blocks.0.qkv"].parts == (SplitPart(4, 12),)
    assert found.splits["blocks.0.proj"].parts == (SplitPart(4, 4),)
    assert not found.mixers


class FewKeys(nn.Module):
    """Fused, with two key heads for four query heads, which its config counts: as Phi-3 (or Falcon, by groups)."""

    def __init__(self, by_groups: bool) -> None:
        super().__init__()
        self.head_dim, self.by_groups = 4, by_groups
        self.config = SimpleNamespace(num_attention_heads=4, num_key_value_heads=2)
        self.qkv_proj, self.o_proj = nn.Linear(WIDTH, 32), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        heads = self.qkv_proj(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        if self.by_groups:
            query, key, value = heads.unflatten(1, (-1, 4)).split([2, 1, 1], 2)
            query, key, value = query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2)
        else:
            counts = [self.config.num_attention_heads, self.config.num_key_value_heads]
            query, key, value = heads.split([*counts, counts[1]], 1)
        mixed = F.scaled_dot_product_attention(query, key, value, enable_gqa=True)
        out: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return out


@pytest.mark.parametrize(
    ("by_groups", "parts"),
    [(False, (SplitPart(4, 4), SplitPart(2, 4), SplitPart(2, 4))), (True, (SplitPart(2, 16),))],
)
def test_fused_attention_with_fewer_key_heads(by_groups: bool, parts: tuple[SplitPart, ...]) -> None:
    inner = FewKeys(by_groups)
    found = pair(Around(inner))
    assert found.splits["blocks.0.qkv_proj"].parts == parts
    assert found.scaled["blocks.0"].of_config == (() if by_groups else ("num_attention_heads", "num_key_value_heads"))
    assert inner.config.num_attention_heads == 4


class Positions(Attention):
    """Attention with a table of relative positions, one column for each head, used for its head or for another."""

    def __init__(self, turn: int = 0) -> None:
        super().__init__()
        self.table, self.turn = nn.Parameter(torch.randn(7, 4)), turn

    def forward(self, hidden: Tensor) -> Tensor:
        batch, sequence, _ = hidden.shape
        query, key, value = self.qkv(hidden).view(batch, sequence, 3, self.num_heads, self.head_dim).unbind(2)
        order = torch.arange(sequence)
        bias = self.table[order[:, None] - order + 3].permute(2, 0, 1).roll(self.turn, 0)
        query, key, value = (part.transpose(1, 2) for part in (query, key, value))
        mixed = F.scaled_dot_product_attention(query, key, value, bias[None])
        out: Tensor = self.proj(mixed.transpose(1, 2).flatten(2))
        return out


def test_a_table_with_a_column_for_each_head_is_split_as_the_heads_are() -> None:
    model = Around(Positions())
    found = pair(model)
    assert found.tables == {"blocks.0.table"}
    assert found.splits["blocks.0.qkv"].kind == "column"
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cut = parameter_cuts(found, shapes, Plan(tensor=TensorPlan(2)), {"x": 1, "y": 0})["blocks.0.table"]
    assert (cut.intervals, cut.replicas, cut.sums) == ((((0, 7),), ((2, 4),)), 1, ())


def test_a_table_whose_columns_belong_to_other_heads_is_not_split() -> None:
    found = pair(Around(Positions(turn=1)))
    assert found.tables == frozenset()
    assert found.splits["blocks.0.qkv"].kind == "gathered"
    assert found.kept["blocks.0.table"] == "a matrix of Positions outside any layer that weft can split"


def test_gate_and_up_in_one_linear() -> None:
    class Gated(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.gate_up_proj, self.down_proj, self.dim = nn.Linear(WIDTH, 48), nn.Linear(24, WIDTH), dim

        def forward(self, hidden: Tensor) -> Tensor:
            both = self.gate_up_proj(hidden).unflatten(-1, (2, -1) if self.dim == -2 else (-1, 2))
            gate, up = both.unbind(self.dim)
            out: Tensor = self.down_proj(F.silu(gate) * up)
            return out

    assert pair(Around(Gated(-2))).splits["blocks.0.gate_up_proj"].parts == (SplitPart(24),) * 2
    assert kinds(Gated(-1)) == {"gate_up_proj": "gathered", "down_proj": "gathered"}  # gate and up alternate


def test_what_surrounds_the_heads_decides_where_the_region_begins() -> None:
    # The input enters at the module only if nothing else takes it: a residual's gradient must not be summed.
    assert pair(Around(Attention())).splits["blocks.0.qkv"].parent == "blocks.0"
    for habit in ("residual", "norm first"):
        assert pair(Around(Attention(habit))).splits["blocks.0.qkv"].parent is None


def test_parameters_inside_and_outside_of_the_heads() -> None:
    assert pair(Around(Attention("head norm"))).inner == {"blocks.0.head_norm.weight", "blocks.0.head_norm.bias"}
    assert pair(Around(Attention("layer scale", "norm first"))).inner == frozenset()


@pytest.mark.parametrize("between", ["plain", "scale", "outer scale"])
def test_two_linears_with_element_wise_work_between_them(between: str) -> None:
    assert kinds(Mix(between)) == {"fc1": "column", "fc2": "row"}
    # A number that scales the inside gets a partial gradient on each rank, one behind the row does not.
    assert pair(Around(Mix(between))).inner == ({"blocks.0.scale"} if between == "scale" else frozenset())


@pytest.mark.parametrize("between", ["softmax", "norm", "per feature", "input", "weight", "twice"])
def test_two_linears_that_cannot_be_proved_are_gathered(between: str) -> None:
    assert kinds(Mix(between)) == {"fc1": "gathered", "fc2": "gathered"}


class NamesItsWidth(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.up, self.down = width, nn.Linear(2, width), nn.Linear(width, 2)

    def forward(self, hidden: Tensor) -> Tensor:
        inner = F.relu(self.up(hidden))
        assert inner.shape[-1] in (self.width, self.width // 2)
        out: Tensor = self.down(inner)
        return out


def test_pairs_of_a_huge_width_are_probed_with_few_features() -> None:
    sizes = {"vocab_size": 8, "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1}
    with torch.device("meta"):
        model = Decoder(DecoderConfig(**sizes, intermediate_size=2 * MAX_PROBED_WIDTH))
        named = NamesItsWidth(2 * MAX_PROBED_WIDTH)
    with LiveTensors() as live:
        found = pair(model)
    assert live.peak_bytes < 1 << 20
    assert found.splits["model.layers.0.mlp.down_proj"].kind == "row"
    assert found.splits["model.layers.0.mlp.down_proj"].parts == (SplitPart(2 * MAX_PROBED_WIDTH),)
    assert pair(named).splits["down"].kind == "row"  # proved with all of its features


def test_a_chain_pairs_over_element_wise_layers_only() -> None:
    layers: list[nn.Module] = [nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH), nn.LayerNorm(WIDTH)]
    layers += [nn.Linear(WIDTH, 8), nn.LayerNorm(8), nn.Linear(8, WIDTH)]
    assert kinds(nn.Sequential(*layers)) == {"0": "column", "2": "row", "4": "gathered", "6": "gathered"}


def test_a_chain_sees_a_module_wherever_it_comes_again() -> None:
    norm, again = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
    chain = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH), norm, nn.Linear(WIDTH, WIDTH))
    assert set(kinds(chain).values()) == {"gathered"}
    chain = nn.Sequential(again, nn.GELU(), again, nn.GELU(), nn.Linear(WIDTH, WIDTH))
    assert set(kinds(chain).values()) == {"gathered"}


def test_convolutions_pair_in_a_chain_over_what_mixes_no_channels() -> None:
    chain = nn.Sequential(
        *(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout2d(), nn.Conv2d(8, 4, 3)),
        *(nn.Conv2d(4, 8, 1), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1), nn.Softmax(1), nn.Conv2d(8, 8, 1)),
        *(nn.Flatten(), nn.Linear(32, 8), nn.ReLU(), nn.Linear(8, 6)),
    )
    found = pair(chain).splits
    assert {name: split.kind for name, split in found.items() if split.num_spatial} == {
        "0": "column",
        "4": "row",
        "5": "gathered",
        "7": "gathered",
        "9": "gathered",
    }
    assert (found["0"].parts, found["4"].parts, found["5"].parts) == ((SplitPart(8),), (SplitPart(8),), (SplitPart(8),))
    assert (found["11"].kind, found["13"].kind) == ("column", "row")


def test_a_subclass_between_convolutions_may_do_anything() -> None:
    class Mixing(nn.Identity):
        def forward(self, value: Tensor) -> Tensor:
            return value.flip(1)

    found = pair(nn.Sequential(nn.Conv1d(4, 8, 1), Mixing(), nn.Conv1d(8, 4, 1))).splits
    assert {split.kind for split in found.values()} == {"gathered"}


def test_a_linear_before_convolutions_is_no_head() -> None:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.conv = nn.Linear(8, 64), nn.Conv2d(4, 4, 3)

    assert {name: split.kind for name, split in pair(Generator()).splits.items()} == {
        "enter": "gathered",
        "conv": "gathered",
    }


def test_a_chain_with_a_forward_of_its_own_is_not_taken_for_a_chain() -> None:
    class Residual(nn.Sequential):
        def forward(self, hidden: Tensor) -> Tensor:
            inner = self[0](hidden)
            out: Tensor = self[2](inner.softmax(-1))
            return out

    assert kinds(Residual(nn.Linear(WIDTH, 8), nn.GELU(), nn.Linear(8, WIDTH))) == {"0": "gathered", "2": "gathered"}


def test_names_of_a_gated_mlp_do_not_make_one() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w1, self.w2, self.w3 = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, hidden: Tensor) -> Tensor:
            out: Tensor = self.w3(self.w2(self.w1(hidden).relu()).relu())
            return out

    assert set(kinds(Deep()).values()) == {"gathered"}


def test_probing_neither_computes_large_matrices_nor_touches_the_random_state() -> None:
    before = torch.get_rng_state()
    with torch.device("meta"):
        model = Around(Mix("plain", first=1 << 14, middle=1 << 16, last=1 << 14))
    found = pair(model)  # 2^30 elements in each of two weights: 16 GiB in float64
    assert {split.kind for split in found.splits.values()} == {"column", "row", "head"}
    assert torch.equal(torch.get_rng_state(), before)


def test_nothing_is_left_on_the_model() -> None:
    model = Around(Attention())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    pair(model)
    assert model.blocks[0].num_heads == 4
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


# --- what is gathered or left whole


@pytest.mark.parametrize(
    ("habit", "reason"),
    [
        ("width of input", "RuntimeError: shape '[2, 4, 16]' is invalid for input of size 64"),
        ("linear inside", "'inside' works between qkv and proj"),
        ("gate by input", "its input is used between qkv and proj, beside going into them"),
    ],
)
def test_attention_that_cannot_be_split_by_heads_is_gathered(habit: str, reason: str) -> None:
    found = pair(Around(Attention(habit)))
    assert found.mixers == {"blocks.0": reason}
    assert {split.kind for name, split in found.splits.items() if name.startswith("blocks.0.")} == {"gathered"}
    assert not found.scaled


def test_attention_with_several_inputs_is_gathered() -> None:
    class Cross(Separate):
        def forward(self, query: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
            return super().forward(query) + memory

    found = pair(Around(Cross()))
    assert "missing 1 required positional argument: 'memory'" in found.mixers["blocks.0"]
    assert found.splits["blocks.0.q"].kind == "gathered"


def test_transformers_attention_that_needs_a_bias_of_each_head_is_gathered() -> None:
    from transformers import BloomConfig, BloomForCausalLM

    model = BloomForCausalLM(BloomConfig(vocab_size=61, hidden_size=16, n_layer=1, n_head=4))
    found = pair(model)
    assert "missing" in found.mixers["transformer.h.0.self_attention"]
    assert found.splits["transformer.h.0.self_attention.query_key_value"].kind == "gathered"


def test_transformers_tables_of_relative_positions() -> None:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(vocab_size=61, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4)
    found = pair(T5ForConditionalGeneration(config))
    attention = "encoder.block.0.layer.0.SelfAttention"
    assert f"{attention}.relative_attention_bias.weight" in found.tables
    assert f"{attention}.relative_attention_bias" not in found.embeddings
    assert found.splits[f"{attention}.q"].parent is None  # the same class attends to the encoder's result


def test_transformers_norm_over_all_heads() -> None:
    from transformers import Olmo2Config, Olmo2ForCausalLM

    found = pair(Olmo2ForCausalLM(Olmo2Config(**_sizes(), num_key_value_heads=2)))
    reason = "its parameter 'q_norm.weight' (16,) is not in a norm of one head (4 features)"
    assert found.mixers["model.layers.0.self_attn"] == reason
    assert found.splits["model.layers.0.self_attn.q_proj"].kind == "gathered"


def test_transformers_embedding_that_scales() -> None:
    from transformers import GemmaConfig, GemmaForCausalLM

    config = GemmaConfig(**_sizes(), num_key_value_heads=2, head_dim=4)
    found = pair(GemmaForCausalLM(config))
    assert found.embeddings == ("model.embed_tokens",)
    assert found.splits["lm_head"].kind == "head"


class Hidden(nn.Module):
    """A matrix outside any linear."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(WIDTH, WIDTH))


class Scaled(nn.Embedding):
    """As Gemma's and BART's."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 4


class Sliced(nn.Embedding):
    """As Whisper's: a part of the table itself."""

    def forward(self, tokens: Tensor) -> Tensor:
        return self.weight[: tokens.shape[1]].expand(len(tokens), -1, -1)


class Centred(nn.Embedding):
    """A lookup, and more of the table."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) - self.weight.mean(0)


def test_what_hides_its_weights_is_left_whole() -> None:
    def kept(inner: nn.Module) -> dict[str, str]:
        return pair(Around(inner)).kept

    for module in (nn.MultiheadAttention(WIDTH, 4), nn.TransformerEncoderLayer(WIDTH, 4)):
        reads = f"{type(module).__name__} reads its parameters without calling layers"
        assert kept(module) == {"blocks.0": reads}
    outside = "outside any layer that weft can split"
    assert kept(Hidden()) == {"blocks.0.matrix": f"a matrix of Hidden {outside}"}
    assert kept(nn.LSTM(WIDTH, WIDTH)) == {
        "blocks.0.weight_ih_l0": f"a matrix of LSTM {outside}",
        "blocks.0.weight_hh_l0": f"a matrix of LSTM {outside}",
    }
    grouped = "a convolution with groups = 4, whose outputs do not see every input"
    assert kept(nn.Conv1d(WIDTH, WIDTH, 3, groups=4)) == {"blocks.0": grouped}
    assert kept(nn.ConvTranspose2d(WIDTH, WIDTH, 3)) == {"blocks.0": "a transposed convolution"}


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (Sliced, "the forward of Sliced uses the embedding's table for more than a lookup"),
        (Centred, "the forward of Centred uses the embedding's table for more than a lookup"),
        (partial(nn.Embedding, max_norm=1.0), "an embedding with max_norm, which needs the whole table"),
        (
            partial(nn.Embedding, scale_grad_by_freq=True),
            "an embedding with scale_grad_by_freq, which needs the whole table",
        ),
    ],
)
def test_embeddings_that_are_more_than_a_table_are_left_whole(make: Any, what: str) -> None:
    found = pair(Around(make(61, WIDTH)))
    assert found.kept == {"blocks.0": what}
    assert "blocks.0" not in found.embeddings


def test_an_embedding_that_works_on_its_rows_is_split() -> None:
    assert "blocks.0" in pair(Around(Scaled(61, WIDTH))).embeddings


def test_a_head_tied_to_a_table_that_is_left_whole_is_left_whole() -> None:
    model = Around(nn.Linear(WIDTH, WIDTH))
    model.embed = Centred(5, WIDTH)
    model.head.weight = model.embed.weight
    found = pair(model)
    assert "head" not in found.splits
    assert found.kept["head"] == "its weight is also that of 'embed', which is left whole"


class Double(nn.Linear):
    """A subclass that is not a linear."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


class Spelled(nn.Linear):
    """As Falcon's: a linear, spelled out."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.T + self.bias


def test_a_subclass_of_a_linear_is_one_if_it_computes_one() -> None:
    assert kinds(nn.Sequential(Spelled(WIDTH, 8), nn.GELU(), Spelled(8, WIDTH))) == {"0": "column", "2": "row"}
    assert pair(Around(Double(WIDTH, WIDTH))).kept == {
        "blocks.0.weight": "a matrix of Double outside any layer that weft can split"
    }


def test_a_linear_whose_weight_is_computed_is_left_whole() -> None:
    found = pair(Around(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH))))
    assert "blocks.0" not in found.splits
    assert list(found.kept) == ["blocks.0.weight_v"]


def test_one_linear_in_two_places_is_gathered_in_both() -> None:
    shared = nn.Linear(WIDTH, WIDTH)
    model = nn.Sequential(nn.Sequential(shared, nn.LayerNorm(WIDTH)), nn.Sequential(shared, nn.LayerNorm(WIDTH)))
    assert {name: split.kind for name, split in pair(model).splits.items()} == {"0.0": "gathered"}


def test_a_bias_that_the_root_holds_too_is_cut_as_its_layer_says() -> None:
    model = Around(nn.Linear(WIDTH, WIDTH))
    model.bias = nn.Parameter(torch.zeros(5))  # as BERT: registered first, under another name
    model.head.bias = model.bias
    found = pair(model)
    assert found.tied == {"bias": "head.bias"}
    cut = parameter_cuts(found, {"bias": (5,)}, Plan(tensor=TensorPlan(2)), {"x": 1, "y": 0})["bias"]
    assert cut.intervals == (((3, 5),),)


def test_one_weight_that_would_be_split_in_two_ways() -> None:
    inner = Mix("plain", middle=WIDTH)
    inner.fc2.weight = inner.fc1.weight
    with pytest.raises(PlanError, match=r"'blocks.0.fc1' and 'blocks.0.fc2' share one weight"):
        pair(Around(inner))


def test_heads_that_nobody_counts() -> None:
    inner = Attention()
    del inner.num_heads, inner.head_dim
    assert pair(Around(inner)).mixers == {"blocks.0": "neither head_dim nor a number of heads is among its attributes"}


def test_projections_of_other_widths_than_the_heads() -> None:
    inner = Attention()
    inner.proj = nn.Linear(2 * WIDTH, WIDTH)
    assert "shapes cannot be multiplied" in pair(Around(inner)).mixers["blocks.0"]
    inner.qkv = nn.Linear(WIDTH, 2 * WIDTH)
    assert pair(Around(inner)).mixers["blocks.0"] == "the 32 outputs of 'qkv' are not q, k and v of whole heads"


# --- logits


class Logits(nn.Module):
    """A language model that works on its logits."""

    def __init__(self, work: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.embed, self.head, self.work = nn.Embedding(8, WIDTH), nn.Linear(WIDTH, 8), work

    def forward(self, tokens: Tensor) -> Tensor:
        return self.work(self.head(self.embed(tokens)))


@pytest.mark.parametrize(
    ("work", "kind"),
    [
        (lambda logits: logits, "head"),
        (lambda logits: torch.tanh(logits / 30) * 30, "head"),
        (lambda logits: logits.float().clamp(-5, 5), "head"),
        (lambda logits: logits.log_softmax(-1), "gathered"),
        (lambda logits: logits + torch.ones(8), "gathered"),
        (lambda logits: logits - logits.mean(-1, keepdim=True), "gathered"),
        (lambda logits: logits[..., :4], "gathered"),
        (lambda logits: logits.flatten(1), "gathered"),
    ],
)
def test_logits_stay_split_only_if_nothing_needs_all_classes(work: Callable[[Tensor], Tensor], kind: str) -> None:
    assert pair(Logits(work)).splits["head"].kind == kind


# --- over y


class PlusOne(nn.RMSNorm):
    """Gemma's: the weight is added to one."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.normalized_shape, 1 + self.weight, self.eps)


class UnitLength(nn.Module):
    """A norm that weft does not know."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.normalize(hidden, dim=-1) * self.weight


class LayerScale(UnitLength):
    """Each feature alone."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * self.weight


def test_norms_are_split_over_y_only_if_they_compute_what_weft_would() -> None:
    assert is_plain_norm(nn.LayerNorm(WIDTH), WIDTH)
    assert is_plain_norm(nn.RMSNorm(WIDTH, eps=1e-3), WIDTH)
    assert not is_plain_norm(PlusOne(WIDTH), WIDTH)
    assert not is_plain_norm(nn.LayerNorm((4, WIDTH)), WIDTH)


def test_transformers_norms() -> None:
    from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    assert all(is_norm(norm) for norm in (LlamaRMSNorm(WIDTH), GemmaRMSNorm(WIDTH)))
    assert is_plain_norm(LlamaRMSNorm(WIDTH), WIDTH)
    assert not is_plain_norm(GemmaRMSNorm(WIDTH), WIDTH)


def test_other_modules_are_split_over_y_only_if_they_treat_each_feature_alone() -> None:
    assert is_feature_wise(LayerScale())
    assert not is_feature_wise(UnitLength())
    assert not is_feature_wise(nn.Conv2d(3, WIDTH, 4))


# --- the arithmetic of cuts


@given(st.integers(1, 200), st.integers(1, 16))
def test_shares_are_even_and_cover_everything(size: int, degree: int) -> None:
    parts = [share(size, degree, index) for index in range(degree)]
    assert parts[0][0] == 0
    assert parts[-1][1] == size
    assert all(left[1] == right[0] for left, right in itertools.pairwise(parts))
    widths = [end - begin for begin, end in parts]
    assert max(widths) - min(widths) <= 1


@given(st.integers(1, 12), st.integers(1, 8), st.sampled_from([1, 2, 3, 4, 6, 12]))
def test_heads_are_never_cut(num_units: int, unit: int, degree: int) -> None:
    for index in range(degree):
        begin, end = share_units(num_units, unit, degree, index)
        assert begin % unit == end % unit == 0


@given(st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]))
def test_few_key_heads_are_repeated_for_the_queries_that_share_them(num_keys: int, degree: int) -> None:
    queries, keys = SplitPart(8, 4), SplitPart(num_keys, 4, is_key=True)
    for index in range(degree):
        begin, end = (bound // 4 for bound in queries.share(degree, index))
        wanted = {query * num_keys // 8 for query in range(begin, end)}
        first, last = (bound // 4 for bound in keys.share(degree, index))
        assert wanted == set(range(first, last))


def test_fused_parts_are_stacked() -> None:
    cut = Cut((12, 1), (stack_intervals([4, 4, 4], [(2, 4), (2, 4), (2, 4)]), ((0, 1),)))
    assert cut.local_shape == (6, 1)
    assert cut.take(torch.arange(12)[:, None]).flatten().tolist() == [2, 3, 6, 7, 10, 11]


def _decoder_of_eight_heads() -> nn.Module:
    sizes = {**_sizes(), "num_attention_heads": 8}
    return Decoder(DecoderConfig(**sizes, architecture="qwen3", num_key_value_heads=2))


@pytest.mark.parametrize("make", [_decoder_of_eight_heads, group_resnet, Text])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize(("x", "y"), [(1, 2), (2, 1), (2, 2), (4, 2), (8, 1)])
@pytest.mark.sampled(3)
def test_every_element_is_held_as_often_as_its_cut_says(
    make: Callable[[], nn.Module], x: int, y: int, sequence: bool
) -> None:
    model = make()
    found = pair(model)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    held = {name: torch.zeros(shape, dtype=torch.long) for name, shape in shapes.items()}
    firsts = dict.fromkeys(shapes, 0)
    for at in [{"x": i, "y": j} for i in range(x) for j in range(y)]:
        for name, cut in parameter_cuts(found, shapes, Plan(tensor=TensorPlan(x, y, sequence)), at).items():
            number = torch.arange(math.prod(cut.shape)).view(cut.shape)
            held[name].view(-1)[cut.take(number).flatten()] += 1
            firsts[name] += math.prod(cut.local_shape) * cut.is_first
    for name, shape in shapes.items():
        replicas = parameter_cuts(found, shapes, Plan(tensor=TensorPlan(x, y, sequence)), {"x": 0, "y": 0})[
            name
        ].replicas
        assert (held[name] == replicas).all(), name
        assert firsts[name] == math.prod(shape), name


def _sizes() -> dict[str, Any]:
    return {
        "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
        "num_attention_heads": 4, "max_position_embeddings": 32,
    }  # fmt: skip


def test_a_pairing_knows_the_block_of_a_name() -> None:
    found = Pairing(blocks=("layers.1", "layers.10"))
    assert found.block_of("layers.10.fc.weight") == "layers.10"
    assert found.block_of("layers.1") == "layers.1"
    assert found.block_of("layers.2.fc") is None


def test_no_backward_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has run one cannot fork ranks where torch knows GPUs, and `verify` asks before it forks."""

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a backward was run")

    monkeypatch.setattr(torch.autograd, "_engine_run_backward", refuse)
    monkeypatch.setattr(torch.autograd.graph, "_engine_run_backward", refuse)
    with pytest.raises(AssertionError, match="a backward was run"):
        torch.ones(1, requires_grad=True).sum().backward()
    config = DecoderConfig(vocab_size=8, hidden_size=8, num_hidden_layers=2, num_attention_heads=2)
    found = pair(Decoder(config).double())
    assert {split.kind for split in found.splits.values()} == {"column", "row", "head"}


class OddlyNamed(nn.Module):
    """Attention, or each token alone, by projections whose names say nothing."""

    def __init__(self, mixes: bool) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(8, 8) for _ in range(3))
        self.mixes = mixes

    def forward(self, hidden: Tensor) -> Tensor:
        one, two, three = self.a(hidden), self.b(hidden), self.c(hidden)
        out: Tensor = torch.softmax(one @ two.mT, -1) @ three if self.mixes else one * two.sigmoid() + three
        return out


@pytest.mark.parametrize("mixes", [True, False])
def test_attention_without_known_names_is_seen_to_mix_tokens(mixes: bool) -> None:
    found = pair(Around(OddlyNamed(mixes)))
    assert found.splits["blocks.0.a"].kind == "gathered"
    reason = "its tokens depend on each other, and weft does not know it as attention"
    assert found.mixers == ({"blocks.0": reason} if mixes else {})


class _Clamped(nn.Linear):
    """Keeps its weight small."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.weight.data.clamp_(-0.1, 0.1)
        return super().forward(hidden)


class _Noted(nn.Linear):
    """Computes what its class does."""

    def forward(self, hidden: Tensor) -> Tensor:
        self.last_shape = hidden.shape
        return super().forward(hidden)


def test_a_linear_that_changes_its_weight_is_no_plain_one() -> None:
    assert is_linear(_Noted(8, 8))
    assert not is_linear(_Clamped(8, 8))
