"""Hugging Face folders, against transformers in float64: both directions, logits, loss and gradients to 1e-10."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.errors import CheckpointError, ConfigError
from weft.models import (
    IGNORE,
    GPT2Config,
    RopeScaling,
    build,
    initialise,
    read_config,
    read_weights,
    save_folder,
    token_loss,
    weights,
    write_config,
    write_weights,
)

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
GPT2_SIZES = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
# Wavelengths of head_dim 8 and theta 10000: 6.3, 63, 628, 6283. One is kept, one blended, two divided.
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 100,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 12}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {**SIZES, "num_key_value_heads": 4}),
    "llama_gqa_tied": ("Llama", {**SIZES, "tie_word_embeddings": True}),
    "llama_rope_scaling": ("Llama", {**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "llama_biases": ("Llama", {**SIZES, "attention_bias": True, "mlp_bias": True}),
    "mistral_window": ("Mistral", {**SIZES, "sliding_window": 5}),
    "mistral_no_window": ("Mistral", {**SIZES, "sliding_window": None}),
    "qwen2": ("Qwen2", SIZES),
    "qwen2_tied": ("Qwen2", {**SIZES, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 1e6}}),
    "qwen3": ("Qwen3", {**SIZES, "head_dim": 10}),
    "qwen3_biases": ("Qwen3", {**SIZES, "head_dim": 8, "attention_bias": True}),
    "mixtral": ("Mixtral", {**SIZES, **EXPERTS, "num_local_experts": 4}),
    "qwen2_moe": ("Qwen2Moe", {**SIZES, **QWEN_EXPERTS, "shared_expert_intermediate_size": 24, "mlp_only_layers": [0]}),
    "qwen3_moe": ("Qwen3Moe", {**SIZES, **QWEN_EXPERTS, "head_dim": 8, "norm_topk_prob": True}),
    "gpt2": ("GPT2", {**GPT2_SIZES, **NO_DROPOUT}),
    "gpt2_inner_untied": ("GPT2", {**GPT2_SIZES, **NO_DROPOUT, "n_inner": 40, "tie_word_embeddings": False}),
}


def norm_in_own_dtype(self: Any, hidden: Tensor) -> Tensor:
    """transformers' RMSNorm without its cast to float32, which rounds float64 models to 1e-7."""
    variance = hidden.pow(2).mean(-1, keepdim=True)
    normed: Tensor = self.weight * (hidden * torch.rsqrt(variance + self.variance_epsilon))
    return normed


def route_in_own_dtype(self: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' choice of experts without its cast to float32."""
    logits = nn.functional.linear(hidden.reshape(-1, self.hidden_dim), self.weight)
    chosen, experts = logits.softmax(-1).topk(self.top_k)
    return logits, chosen / chosen.sum(-1, keepdim=True) if getattr(self, "norm_topk_prob", True) else chosen, experts


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Llama", "Mistral", "Qwen2", "Qwen3", "Mixtral", "Qwen2Moe", "Qwen3Moe"):
        kind = name.replace("Moe", "_moe").lower()
        module = getattr(transformers.models, kind)
        norm = getattr(getattr(module, f"modeling_{kind}"), f"{name}RMSNorm")
        monkeypatch.setattr(norm, "forward", norm_in_own_dtype)
        router = getattr(getattr(module, f"modeling_{kind}"), f"{name}TopKRouter", None)
        if router is not None:
            monkeypatch.setattr(router, "forward", route_in_own_dtype)


def make_theirs(case: str, dtype: torch.dtype = torch.float64) -> Any:
    """A tiny random transformers model whose norms and biases are not at their trivial values."""
    kind, table = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**table, bos_token_id=None, eos_token_id=None)
    config._attn_implementation = "sdpa"
    config._experts_implementation = "eager"  # torch's grouped matmul has no float64
    torch.manual_seed(7)
    model = getattr(transformers, f"{kind}LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM")(config)
    for parameter in model.parameters():
        nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.2)
    return model.to(dtype).eval()


def saved(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, 61, (3, 17), generator=generator)
    labels = torch.randint(0, 61, (3, 17), generator=generator)
    labels[0, :4] = IGNORE
    return tokens, labels


def mean_loss(logits: Tensor, labels: Tensor) -> Tensor:
    total, count = token_loss(logits, labels)
    return total / count


def assert_close(ours: Tensor, theirs: Tensor, tolerance: float = 1e-10) -> None:
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert (ours - theirs).abs().max().item() < tolerance


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.full(2)
def test_their_folder_gives_their_logits_and_loss(case: str, tmp_path: Path, batch: tuple[Tensor, Tensor]) -> None:
    tokens, labels = batch
    theirs = make_theirs(case)
    folder = saved(theirs, tmp_path)
    ours = build(read_config(folder)).double()
    read_weights(folder, ours)
    with torch.no_grad():
        logits, expected = ours(tokens), theirs(tokens).logits
        assert expected.std() > 0.1  # a model whose output is nothing would agree with anything
        assert_close(logits, expected)
        # transformers' own loss: shift_labels are labels already shifted
        loss = theirs(tokens, labels=labels, shift_labels=labels).loss
        assert_close(mean_loss(logits, labels), loss.double(), 1e-6)  # its loss is float32
        assert_close(mean_loss(logits, labels), nn.functional.cross_entropy(expected.flatten(0, 1), labels.flatten()))


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("case", CASES)
@pytest.mark.full(2)
def test_our_folder_gives_transformers_our_logits(case: str, tmp_path: Path, batch: tuple[Tensor, Tensor]) -> None:
    config = read_config(saved(make_theirs(case), tmp_path / "theirs"))
    ours = build(config).double()
    initialise(ours, seed=5)
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.mul_(5).add_(0.01)
        save_folder(tmp_path / "ours", ours)
        assert read_config(tmp_path / "ours") == config
        loader: Any = transformers.AutoModelForCausalLM
        how = {"attn_implementation": "sdpa", "experts_implementation": "eager"}
        theirs, report = loader.from_pretrained(tmp_path / "ours", output_loading_info=True, **how)
        assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
        assert type(theirs).__name__ == json.loads((tmp_path / "ours/config.json").read_text())["architectures"][0]
        assert theirs.dtype == torch.float64
        expected = theirs.eval()(batch[0]).logits
        assert expected.std() > 0.1
        assert_close(ours(batch[0]), expected)


@pytest.mark.parametrize("case", ["llama_gqa_tied", "mistral_window", "qwen3", "qwen3_moe", "gpt2"])
def test_float32_agrees_with_transformers_untouched(case: str, tmp_path: Path, batch: tuple[Tensor, Tensor]) -> None:
    theirs = make_theirs(case, torch.float32)
    ours = build(read_config(saved(theirs, tmp_path)))
    read_weights(tmp_path, ours)
    with torch.no_grad():
        expected = theirs(batch[0]).logits
        assert_close(ours(batch[0]), expected, 2e-6 * expected.abs().max().item() + 1e-6)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("case", ["llama_gqa_tied", "mistral_window", "qwen3_biases", "mixtral", "qwen2_moe", "gpt2"])
def test_gradients_equal_those_of_transformers(case: str, tmp_path: Path, batch: tuple[Tensor, Tensor]) -> None:
    tokens, labels = batch
    theirs = make_theirs(case)
    ours = build(read_config(saved(theirs, tmp_path))).double()
    read_weights(tmp_path, ours)
    mean_loss(ours(tokens), labels).backward()
    mean_loss(theirs(tokens).logits, labels).backward()
    expected = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    gradients = {name: parameter.grad for name, parameter in ours.named_parameters()}
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient is not None
        is_conv1d = case == "gpt2" and any(f".{part}.weight" in name for part in ("c_attn", "c_proj", "c_fc"))
        assert_close(gradient.t() if is_conv1d else gradient, expected[name])


@pytest.mark.parametrize("case", ["llama_gqa_tied", "qwen3", "mixtral", "qwen3_moe", "gpt2"])
def test_shards_round_trip_in_both_directions(case: str, tmp_path: Path) -> None:
    theirs = make_theirs(case)
    config = read_config(saved(theirs, tmp_path / "theirs", max_shard_size="20KB"))
    assert (tmp_path / "theirs/model.safetensors.index.json").exists()
    original = dict(weights(tmp_path / "theirs", config))
    write_weights(tmp_path / "ours", config, reversed(original.items()), max_shard_bytes=20_000)
    files = sorted(file.name for file in (tmp_path / "ours").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "ours/model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in original.values())
    assert set(index["weight_map"].values()) == set(files)
    largest = max(tensor.nbytes for tensor in original.values())
    for file in files:
        held = load_file(tmp_path / "ours" / file)
        assert sum(tensor.nbytes for tensor in held.values()) <= max(20_000, largest)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").state_dict()
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(again[name], tensor) for name, tensor in theirs.state_dict().items())
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_bfloat16_weights_survive_bit_for_bit(tmp_path: Path) -> None:
    theirs = make_theirs("qwen2", torch.bfloat16)
    ours = build(read_config(saved(theirs, tmp_path / "theirs"))).to(torch.bfloat16)
    read_weights(tmp_path / "theirs", ours)
    save_folder(tmp_path / "ours", ours)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("theirs", "ours"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) and after[name].dtype == torch.bfloat16 for name in before)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    """Replace the tensors of a one-file folder."""
    tensors = change(load_file(folder / "model.safetensors"))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def test_gpt2_files_without_prefix_and_with_legacy_buffers(tmp_path: Path) -> None:
    theirs = make_theirs("gpt2")

    def legacy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        bare = {name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}
        bare["h.0.attn.bias"] = torch.ones(1, 1, 64, 64)
        bare["h.1.attn.masked_bias"] = torch.tensor(-1e4)
        return bare

    folder = rewritten(saved(theirs, tmp_path), legacy)
    loaded = dict(weights(folder, read_config(folder)))
    assert torch.equal(loaded["transformer.h.1.mlp.c_fc.weight"].t(), theirs.transformer.h[1].mlp.c_fc.weight)
    assert len(loaded) == len(list(theirs.parameters()))


def test_tied_head_may_be_present_if_equal(tmp_path: Path) -> None:
    folder = saved(make_theirs("llama_gqa_tied"), tmp_path)
    config = read_config(folder)
    rewritten(folder, lambda old: {**old, "lm_head.weight": old["model.embed_tokens.weight"].clone()})
    assert "lm_head.weight" not in dict(weights(folder, config))
    rewritten(folder, lambda old: {**old, "lm_head.weight": old["model.embed_tokens.weight"] + 1})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: lm_head\.weight differs .* tie_word_embeddings"):
        read_weights(folder, build(config))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda old: {name: tensor for name, tensor in old.items() if name != "model.norm.weight"},
            r"tensor model\.norm\.weight missing",
        ),
        (lambda old: {**old, "model.extra.weight": torch.ones(2)}, r"safetensors: unexpected tensor model\.extra"),
        (
            lambda old: {**old, "model.norm.weight": torch.ones(31)},
            r"model\.safetensors: model\.norm\.weight has shape \(31,\), but the config needs \(32,\)",
        ),
    ],
)
def test_strict_names_and_shapes(tmp_path: Path, change: Any, message: str) -> None:
    folder = rewritten(saved(make_theirs("llama"), tmp_path), change)
    ours = build(read_config(folder))
    before = {name: tensor.clone() for name, tensor in ours.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        read_weights(folder, ours)
    # Checked before anything is loaded.
    assert all(torch.equal(before[name], tensor) for name, tensor in ours.state_dict().items())


def test_untied_config_needs_a_head(tmp_path: Path) -> None:
    folder = rewritten(
        saved(make_theirs("llama"), tmp_path), lambda old: {k: v for k, v in old.items() if "lm" not in k}
    )
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight missing"):
        read_weights(folder, build(read_config(folder)))


@pytest.mark.parametrize("target", ["../model.safetensors", "/etc/passwd", "sub/x.safetensors", "..", 7])
def test_index_may_not_leave_the_folder(tmp_path: Path, target: object) -> None:
    index = {"weight_map": {"lm_head.weight": target}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: tensor lm_head\.weight points to"):
        list(weights(tmp_path, GPT2Config()))


def test_broken_folders_say_what_is_wrong(tmp_path: Path) -> None:
    config = GPT2Config()
    with pytest.raises(CheckpointError, match=r"config\.json does not exist"):
        read_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        list(weights(tmp_path, config))
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        CheckpointError, match=r"pytorch_model\.bin is pickled and never opened, convert it to safetens"
    ):
        list(weights(tmp_path, config))
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors does not exist, but .* places tensor lm_head\.weight"):
        list(weights(tmp_path, config))
    save_file({"other": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match=r"a\.safetensors and .* disagree on tensor lm_head\.weight, other"):
        list(weights(tmp_path, config))
    (tmp_path / "a.safetensors").write_bytes((tmp_path / "a.safetensors").read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"a\.safetensors is not a whole safetensors file"):
        list(weights(tmp_path, config))
    for broken in ("{", "[" * 100_000):
        index.write_text(broken)
        with pytest.raises(CheckpointError, match=r"index\.json cannot be read as JSON"):
            list(weights(tmp_path, config))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"config\.json holds list, not a JSON object"):
        read_config(tmp_path)


def test_writing_is_strict_and_leaves_nothing_half_written(tmp_path: Path) -> None:
    config = read_config(saved(make_theirs("llama"), tmp_path / "theirs"))
    tensors = dict(weights(tmp_path / "theirs", config))

    def failing() -> Iterator[tuple[str, Tensor]]:
        yield next(iter(tensors.items()))
        raise RuntimeError("a rank died")

    target = tmp_path / "out"
    partial = {name: tensor for name, tensor in tensors.items() if name != "model.norm.weight"}
    with pytest.raises(CheckpointError, match=r"tensor model\.norm\.weight missing from the tensors to write"):
        write_weights(target, config, partial.items())
    with pytest.raises(CheckpointError, match=r"unexpected tensor model\.extra to write"):
        write_weights(target, config, [("model.extra", torch.ones(1))])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\), but the config needs \(32,\)"):
        write_weights(target, config, [("model.norm.weight", torch.ones(3))])
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight is given twice"):
        write_weights(target, config, [("model.norm.weight", torch.ones(32))] * 2)
    with pytest.raises(RuntimeError, match="a rank died"):
        write_weights(target, config, failing())
    assert [entry.name for entry in tmp_path.iterdir()] == ["theirs"]
    target.mkdir()
    write_weights(target, config, tensors.items())  # an empty folder may be taken
    with pytest.raises(CheckpointError, match="exists and is not an empty folder"):
        write_weights(target, config, tensors.items())
    with pytest.raises(CheckpointError, match=r"config\.json exists"):
        write_config(target, config)


def changed_config(folder: Path, case: str, **changes: Any) -> Path:
    """config.json of a case with some keys changed; the value ... removes the key."""
    kind, table = CASES[case]
    config = getattr(transformers, f"{kind}Config")(**table)
    name = "GPT2LMHeadModel" if kind == "GPT2" else f"{kind}ForCausalLM"
    raw = {**config.to_diff_dict(), "architectures": [name], **changes}
    raw = {key: value for key, value in raw.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (
            "llama",
            {"architectures": ["GemmaForCausalLM"]},
            r"\['GemmaForCausalLM'\] is not supported; weft reads Llama",
        ),
        ("llama", {"architectures": ...}, "architectures = None is not supported"),
        ("llama", {"model_type": "granite"}, "model_type = 'granite' contradicts"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported in architecture 'llama', only 'silu'"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        (
            "llama",
            {"attention_multiplier": 0.5},
            "key 'attention_multiplier' = 0.5 is unknown for architecture 'llama'",
        ),
        ("llama", {"final_logit_softcapping": 30.0}, "key 'final_logit_softcapping' = 30.0 is unknown"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config.quant_method = None is not read"),
        ("llama", {"sliding_window": 16}, "key 'sliding_window' = 16 is unknown"),
        ("llama", {"use_rope": False}, "key 'use_rope' = False is unknown"),
        ("llama", {"rms_norm_eps": ...}, "key 'rms_norm_eps' is missing"),
        ("llama", {"hidden_size": "32"}, "'hidden_size' = '32' .a string. but it expects an integer"),
        ("llama", {"num_attention_heads": 5}, "num_attention_heads = 5 does not divide hidden_size = 32"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}},
            "rope_parameters.rope_type = 'yarn' is not supported; weft knows 'default' and 'llama3'",
        ),
        (
            "llama",
            {"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_scaling.rope_type = 'linear' is not supported",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1]}},
            r"rope_parameters = \{'mrope_section': \[1\]\} is not supported",
        ),
        ("llama", {"rope_parameters": {"rope_type": "llama3"}}, "missing keys 'rope_scaling.factor'"),
        ("llama", {"rope_theta": 5.0}, "rope_theta = 5.0 contradicts rope_parameters.rope_theta = 10000.0"),
        ("llama", {"rope_scaling": {"type": "default"}}, "both given"),
        ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5 is not supported"),
        ("mistral_window", {"sliding_window": ...}, "key 'sliding_window' is missing"),
        ("mistral_window", {"attention_bias": True}, "key 'attention_bias' = True is unknown"),
        (
            "qwen2",
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "use_sliding_window = True is not supported",
        ),
        ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* is not supported"),
        ("qwen3", {"head_dim": None}, "key 'head_dim' is missing or null"),
        ("gpt2", {"activation_function": "relu"}, "activation_function = 'relu' is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True is not supported"),
        ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights = False is not supported"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention = True is not supported"),
    ],
)
def test_what_changes_the_mathematics_is_refused(
    tmp_path: Path, case: str, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(changed_config(tmp_path, case, **changes))
    assert "config.json" in str(caught.value)


def test_old_and_new_rope_keys_read_alike(tmp_path: Path) -> None:
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    new = read_config(changed_config(tmp_path, "llama_rope_scaling"))
    old_keys = {"rope_parameters": ..., "rope_theta": 10000.0, "rope_scaling": scaling}
    assert read_config(changed_config(tmp_path, "llama_rope_scaling", **old_keys)) == new
    assert new.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 100)  # type: ignore[union-attr]
    both_kinds = {"rope_parameters": ..., "rope_theta": 10000, "rope_scaling": {**scaling, "type": "llama3"}}
    assert read_config(changed_config(tmp_path, "llama_rope_scaling", **both_kinds)) == new
    plain = read_config(changed_config(tmp_path, "llama", rope_parameters=..., rope_theta=5e5, rope_scaling=None))
    assert (plain.rope_theta, plain.rope_scaling) == (5e5, None)  # type: ignore[union-attr]


def test_first_llama_configs_without_key_heads_or_theta(tmp_path: Path) -> None:
    absent = {"num_key_value_heads": ..., "head_dim": ..., "rope_parameters": ..., "tie_word_embeddings": ...}
    config = read_config(changed_config(tmp_path, "llama", **absent))
    assert config == read_config(changed_config(tmp_path, "llama"))


def test_gpt2_dropout_is_read(tmp_path: Path) -> None:
    config = read_config(changed_config(tmp_path, "gpt2", resid_pdrop=0.2, attn_pdrop=..., embd_pdrop=0.0))
    assert isinstance(config, GPT2Config)
    assert (config.resid_pdrop, config.attn_pdrop, config.embd_pdrop) == (0.2, 0.1, 0.0)
