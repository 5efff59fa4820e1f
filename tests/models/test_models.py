"""The plain models by themselves: configs, first values, attention, loss. test_hf.py holds them to transformers."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from typing import Any, get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from weft.architectures.experts import SPARSE_ARCHITECTURES
from weft.architectures.language import DecoderArchitecture
from weft.errors import ConfigError
from weft.models import (
    IGNORE,
    DecoderConfig,
    GPT2Config,
    ModelConfig,
    RopeScaling,
    build,
    config_from_table,
    initial_value,
    initialise,
    token_loss,
)
from weft.models.decoder import CausalAttention, Decoder, RMSNorm, rotary_tables
from weft.schema import to_table

SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192)
BIG: dict[str, ModelConfig] = {
    "llama_70b": DecoderConfig(
        vocab_size=128256, hidden_size=8192, intermediate_size=28672, num_hidden_layers=80, num_attention_heads=64,
        num_key_value_heads=8, max_position_embeddings=131072, rope_theta=500000.0, rope_scaling=SCALING,
        attention_bias=True,
    ),
    "mistral": DecoderConfig(architecture="mistral", num_key_value_heads=4, sliding_window=4096),
    "qwen2_tied": DecoderConfig(
        architecture="qwen2", hidden_size=896, num_attention_heads=14, num_key_value_heads=2, tie_word_embeddings=True
    ),
    "qwen3": DecoderConfig(architecture="qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128),
    "gpt2": GPT2Config(),
    "gpt2_untied": GPT2Config(tie_word_embeddings=False, n_inner=1000),
}  # fmt: skip


@pytest.fixture(params=BIG)
def config(request: pytest.FixtureRequest) -> ModelConfig:
    return BIG[request.param].shrunk()


@pytest.fixture
def tokens() -> Tensor:
    return torch.randint(0, 61, (2, 13), generator=torch.Generator().manual_seed(1))


def ready(config: ModelConfig, dtype: torch.dtype = torch.float64) -> Any:
    model = build(config).to(dtype)
    initialise(model, seed=11)
    return model


# Configs


def test_derived_sizes() -> None:
    config = DecoderConfig(hidden_size=4096, num_attention_heads=32)
    assert (config.intermediate_size, config.num_key_value_heads, config.head_dim) == (11008, 32, 128)
    assert (config.qkv_bias, config.qk_norm) == (False, False)
    assert DecoderConfig(architecture="qwen2").qkv_bias is True
    assert DecoderConfig(architecture="qwen3", hidden_size=1024, num_attention_heads=16, head_dim=128).head_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"num_attention_heads": 10},
            "num_attention_heads = 10 does not divide hidden_size = 768; use one of 1, 2, 3, 4,",
        ),
        (
            {"num_key_value_heads": 5},
            "num_key_value_heads = 5 does not divide num_attention_heads = 12; use one of 1, 2",
        ),
        ({"vocab_size": 0}, "vocab_size = 0 must be positive"),
        ({"head_dim": -2}, "head_dim = -2 must be positive"),
        ({"num_hidden_layers": -1}, "num_hidden_layers = -1 must be positive"),
        ({"hidden_size": 60, "num_attention_heads": 12}, "head_dim = 5 is odd"),
        ({"architecture": "gemma"}, "architecture = 'gemma' is not a decoder; use llama, mistral, qwen2, qwen3"),
        (
            {"sliding_window": 8},
            "sliding_window = 8 does not exist in architecture 'llama'; .* use architecture 'mistral'",
        ),
        ({"architecture": "mistral", "sliding_window": -1}, "sliding_window = -1 must be positive"),
        ({"architecture": "qwen2", "mlp_bias": True}, "mlp_bias = True does not exist in architecture 'qwen2'"),
        ({"architecture": "qwen2", "qkv_bias": False}, "qkv_bias = False contradicts architecture 'qwen2'"),
        ({"qk_norm": True}, "qk_norm = True contradicts architecture 'llama'"),
    ],
)
def test_decoder_config_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DecoderConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_head": 7}, "n_head = 7 does not divide n_embd = 768"),
        ({"n_layer": 0}, "n_layer = 0 must be positive"),
        ({"n_inner": -4}, "n_inner = -4 must be positive"),
        ({"attn_pdrop": 1.5}, "attn_pdrop = 1.5 is no dropout probability; use 0 <= attn_pdrop < 1"),
    ],
)
def test_gpt2_config_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        GPT2Config(**changes)


def test_rope_scaling_refuses_an_empty_band() -> None:
    with pytest.raises(
        ConfigError, match=r"high_freq_factor = 1.0 must be larger than rope_scaling.low_freq_factor = 1.0"
    ):
        replace(SCALING, high_freq_factor=1.0)


def test_tables_choose_the_kind() -> None:
    assert config_from_table({}) == DecoderConfig()
    assert config_from_table({"architecture": "gpt2", "n_embd": 96}) == GPT2Config(n_embd=96)
    table = {"architecture": "llama", "rope_theta": 500000, "rope_scaling": asdict(SCALING)}
    assert config_from_table(table) == DecoderConfig(rope_theta=500000.0, rope_scaling=SCALING)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"hiden_size": 64}, "unknown key 'model.hiden_size'; did you mean 'hidden_size'?"),
        ({"architecture": "gpt2", "hidden_size": 64}, "unknown key 'model.hidden_size'"),
        ({"hidden_size": "64"}, "'model.hidden_size' = '64' (a string) but it expects an integer"),
        ({"hidden_size": True}, "'model.hidden_size' = True (true or false) but it expects an integer"),
        ({"rope_scaling": {"factor": 8.0}}, "missing keys 'model.rope_scaling.low_freq_factor'"),
        ({"architecture": "lama"}, "unknown 'model.architecture' = 'lama'; did you mean 'llama'?"),
    ],
)
def test_tables_refuse(table: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config_from_table(table)
    assert message in str(caught.value)


@st.composite
def decoder_configs(draw: st.DrawFn) -> DecoderConfig:
    # DeepSeek-V3 has sizes of its own, in test_deepseek.py.
    names = [name for name in get_args(DecoderArchitecture) if name != "deepseek_v3"]
    architecture: DecoderArchitecture = draw(st.sampled_from(names))
    key_heads, group, head_dim = draw(st.integers(1, 16)), draw(st.integers(1, 16)), 2 * draw(st.integers(1, 80))
    square = architecture == "llama" or draw(st.booleans())
    experts: dict[str, Any] = {}
    if architecture in SPARSE_ARCHITECTURES:
        experts = {"num_experts": draw(st.integers(1, 300)), "moe_intermediate_size": draw(st.integers(0, 3000))}
        experts["num_experts_per_tok"] = draw(st.integers(1, experts["num_experts"]))
    return DecoderConfig(
        architecture=architecture,
        vocab_size=draw(st.integers(1, 300000)),
        hidden_size=key_heads * group * head_dim * (1 if square else 3),
        num_attention_heads=key_heads * group,
        num_key_value_heads=key_heads,
        head_dim=head_dim,
        num_hidden_layers=draw(st.integers(1, 100)),
        max_position_embeddings=draw(st.integers(1, 200000)),
        tie_word_embeddings=draw(st.booleans()),
        attention_bias=architecture in ("llama", "qwen3") and draw(st.booleans()),
        mlp_bias=architecture == "llama" and draw(st.booleans()),
        rope_scaling=draw(st.sampled_from([None, SCALING])),
        sliding_window=draw(st.sampled_from([None, 3, 4096])) if architecture == "mistral" else None,
        **experts,
    )


@given(decoder_configs())
def test_shrunk_decoders_are_tiny_and_alike(config: DecoderConfig) -> None:
    tiny = config.shrunk()
    assert tiny.hidden_size <= 32
    assert tiny.vocab_size <= 61
    assert tiny.num_hidden_layers <= 2
    assert tiny.max_position_embeddings <= 64
    group = config.num_attention_heads // config.num_key_value_heads
    assert tiny.num_attention_heads // tiny.num_key_value_heads == min(group, 8)
    same = ("architecture", "tie_word_embeddings", "attention_bias", "qkv_bias", "mlp_bias", "qk_norm", "rope_theta")
    assert all(getattr(tiny, name) == getattr(config, name) for name in same)
    assert (tiny.rope_scaling is None) == (config.rope_scaling is None)
    assert (tiny.sliding_window is None) == (config.sliding_window is None)
    assert tiny.num_experts == min(config.num_experts, 8)
    assert tiny.moe_intermediate_size <= 32

    def is_square(some: DecoderConfig) -> bool:
        return some.num_attention_heads * some.head_dim == some.hidden_size

    assert is_square(tiny) == is_square(config)
    assert tiny.shrunk().num_attention_heads == tiny.num_attention_heads


@given(decoder_configs())
def test_a_config_survives_its_table(config: DecoderConfig) -> None:
    assert config_from_table(to_table(config)) == config


@pytest.mark.parametrize("name", BIG)
def test_shrunk_models_have_the_same_parameter_names(name: str) -> None:
    config = BIG[name]
    big = replace(config, n_layer=2) if isinstance(config, GPT2Config) else replace(config, num_hidden_layers=2)
    with torch.device("meta"):
        expected = set(build(big).state_dict())
        tiny = build(big.shrunk())
    assert set(tiny.state_dict()) == expected
    assert len(list(tiny.parameters())) == len(expected) - big.tie_word_embeddings


# First values


def test_meta_build_then_empty_gives_the_same_model(config: ModelConfig, tokens: Tensor) -> None:
    with torch.device("meta"):
        model = build(config)
    assert model(tokens.to("meta")).shape == (2, 13, config.vocab_size)
    with pytest.raises(ConfigError, match=r"(embed_tokens|wte)\.weight is on the meta device; call model\.to_empty"):
        initialise(model, seed=11)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter, float("nan"))  # what to_empty leaves is anything
    initialise(model, seed=11)
    model.double()
    assert (model.lm_head.weight is model.get_parameter(config.embedding_name)) == config.tie_word_embeddings
    assert torch.equal(model(tokens), ready(config)(tokens))


def test_wrapped_model_keeps_its_tie_through_to_empty() -> None:
    with torch.device("meta"):
        inner = build(BIG["qwen2_tied"].shrunk())
    nn.Sequential(inner).to_empty(device="cpu")
    assert inner.lm_head.weight is inner.get_parameter("model.embed_tokens.weight")


def test_first_values_depend_on_seed_and_name_only(config: ModelConfig) -> None:
    model = ready(config)
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    torch.manual_seed(0)
    for name in reversed(values):
        value = initial_value(config, name, values[name].shape, seed=11)
        assert value.dtype == torch.float32
        assert torch.equal(value.double(), values[name])
    low = ready(config, torch.bfloat16)
    assert all(torch.equal(p, values[name].to(torch.bfloat16)) for name, p in low.named_parameters())
    initialise(model, seed=12)
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, values[name])}
    assert changed == {name for name, value in values.items() if value.ndim > 1}


def test_first_values_follow_the_scheme() -> None:
    config = GPT2Config(n_embd=96, n_layer=8, vocab_size=500)
    values = {name: p.detach() for name, p in ready(config).named_parameters()}
    assert abs(values["transformer.wte.weight"].std().item() / 0.02 - 1) < 0.02
    assert abs(values["transformer.h.0.mlp.c_proj.weight"].std().item() / (0.02 / 4) - 1) < 0.02
    assert abs(values["transformer.h.0.mlp.c_fc.weight"].std().item() / 0.02 - 1) < 0.02
    assert torch.equal(values["transformer.ln_f.weight"], torch.ones(96, dtype=torch.float64))
    assert torch.equal(values["transformer.ln_f.bias"], torch.zeros(96, dtype=torch.float64))
    assert not torch.equal(values["transformer.h.0.mlp.c_fc.weight"], values["transformer.h.1.mlp.c_fc.weight"])


def test_first_values_stay_the_same_from_release_to_release() -> None:
    value = initial_value(DecoderConfig(), "model.layers.0.self_attn.q_proj.weight", torch.Size((4, 8)), seed=1)
    expected = torch.tensor([-0.02134595, -0.01206749, 0.00453553, 0.00080729])
    torch.testing.assert_close(value[0, :4], expected, rtol=1e-5, atol=1e-7)


def test_a_tied_head_alone_has_the_embedding_values() -> None:
    config, shape = DecoderConfig(tie_word_embeddings=True), torch.Size((6, 4))
    embedding = initial_value(config, "model.embed_tokens.weight", shape, seed=3)
    assert torch.equal(initial_value(config, "lm_head.weight", shape, seed=3), embedding)
    untied = replace(config, tie_word_embeddings=False)
    assert not torch.equal(initial_value(untied, "lm_head.weight", shape, seed=3), embedding)


# Mathematics


def naive_attention(query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    """Position by position and head by head, as in the definition."""
    out = torch.zeros_like(query)
    group = query.shape[1] // key.shape[1]
    for head in range(query.shape[1]):
        for t in range(query.shape[2]):
            first = 0 if window is None else max(0, t - window + 1)
            seen_key, seen_value = (x[:, head // group, first : t + 1] for x in (key, value))
            scores = torch.einsum("bd,bsd->bs", query[:, head, t], seen_key) / math.sqrt(query.shape[-1])
            out[:, head, t] = torch.einsum("bs,bsd->bd", scores.softmax(-1), seen_value)
    return out


@pytest.mark.parametrize("group", [1, 3])
@pytest.mark.parametrize("window", [None, 1, 4, 7, 8])
def test_attention_is_the_definition(group: int, window: int | None) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((2, 2 * group, 7, 4), (2, 2, 7, 4), (2, 2, 7, 4))
    inputs = [torch.randn(s, dtype=torch.float64, generator=generator, requires_grad=True) for s in shapes]
    upstream = torch.randn(shapes[0], dtype=torch.float64, generator=generator)
    out = CausalAttention(window)(*inputs)
    query, key, value = inputs
    expected = naive_attention(query, key, value, window)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    for ours, theirs in zip(
        torch.autograd.grad(out, inputs, upstream), torch.autograd.grad(expected, inputs, upstream), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_no_position_sees_the_future(config: ModelConfig, tokens: Tensor) -> None:
    model = ready(config)
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.allclose(before[:, 6:], after[:, 6:], rtol=0, atol=1e-9)


def test_rotary_tables_of_a_part_are_a_part_of_the_tables() -> None:
    config = BIG["llama_70b"]
    assert isinstance(config, DecoderConfig)
    whole = rotary_tables(config, torch.arange(40), torch.float64)
    part = rotary_tables(config, torch.arange(10, 20), torch.float64)
    for table, slice_ in zip(whole, part, strict=True):
        assert table.shape == (40, config.head_dim)
        assert table.dtype == torch.float64
        assert torch.equal(table[10:20], slice_)


def test_casting_leaves_no_stale_table(tokens: Tensor) -> None:
    config = BIG["llama_70b"].shrunk()
    model = ready(config, torch.bfloat16)
    rounded = build(config).double()
    rounded.load_state_dict(model.state_dict())
    assert torch.equal(model.double()(tokens), rounded(tokens))
    assert not list(model.buffers())


def test_norm_is_computed_wide() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(5, 64, dtype=torch.float64, generator=generator)
    norm = RMSNorm(64, 1e-6)
    expected = hidden / (hidden.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(norm.double()(hidden), expected, rtol=0, atol=1e-14)
    low = hidden.to(torch.bfloat16)
    wide = norm.float()(low.float())
    assert torch.equal(norm.to(torch.bfloat16)(low), wide.to(torch.bfloat16))


def test_layers_are_blocks_without_graph_breaks(tokens: Tensor) -> None:
    model = ready(BIG["mistral"].shrunk())
    assert isinstance(model, Decoder)
    hidden = model.model.embed_tokens(tokens)
    cos, sin = rotary_tables(model.config, torch.arange(13), hidden.dtype)
    layer = model.model.layers[0]
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(compiled(hidden, cos, sin), layer(hidden, cos, sin))


def test_gpt2_refuses_a_sequence_beyond_its_positions() -> None:
    model = build(GPT2Config().shrunk())
    with pytest.raises(ConfigError, match="a sequence of 65 tokens exceeds n_positions = 64"):
        model(torch.zeros(1, 65, dtype=torch.long))


@pytest.mark.parametrize("kind", ["resid_pdrop", "embd_pdrop", "attn_pdrop"])
def test_gpt2_drops_out_in_training_only(kind: str, tokens: Tensor) -> None:
    config = config_from_table({**to_table(GPT2Config().shrunk()), kind: 0.5})
    model, plain = ready(config), ready(GPT2Config().shrunk())
    torch.manual_seed(0)
    assert not torch.allclose(model(tokens), plain(tokens))
    assert torch.equal(model.eval()(tokens), plain(tokens))


# Loss


def test_loss_is_a_sum_over_valid_labels() -> None:
    logits = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0], [5.0, 1.0]]])
    total, count = token_loss(logits, torch.tensor([[1, 0, IGNORE]]))
    assert total.item() == pytest.approx(math.log(2) + math.log(4 / 3), rel=1e-6)
    assert count.item() == 2
    total, count = token_loss(logits, torch.full((1, 3), IGNORE))
    assert (total.item(), count.item()) == (0.0, 0)


def test_loss_parts_add_up_and_are_wide() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 6, 11, generator=generator)
    labels = torch.randint(0, 11, (4, 6), generator=generator)
    labels[1] = IGNORE
    whole, parts = token_loss(logits.double(), labels), [token_loss(logits.double()[i], labels[i]) for i in range(4)]
    assert sum(part[0].item() for part in parts) == pytest.approx(whole[0].item(), rel=1e-14)
    assert sum(part[1].item() for part in parts) == whole[1].item() == 18
    assert whole[0].dtype == torch.float64
    low = logits.to(torch.bfloat16)
    assert token_loss(low, labels)[0].dtype == torch.float32
    assert torch.equal(token_loss(low, labels)[0], token_loss(low.float(), labels)[0])
