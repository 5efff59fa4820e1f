"""What compiled blocks keep for backward, predicted from torch's own partition and held to blocks that are compiled.

`aot_eager_decomp_partition` traces, decomposes and cuts as inductor does, and generates no code.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # before ranks are forked
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from runs_for_tests import write_run_file
from sampled_for_tests import one_in
from tensor_for_tests import saved_bytes, saved_bytes_of_ranks
from torch import Tensor, nn

import weft.compile.saved_bytes
from weft.cluster.hardware import Cluster, load, local_cluster
from weft.compile.saved_bytes import compiled_profile, profile_under
from weft.compile.torch_partition import Partition
from weft.inspection.blocks import find_blocks
from weft.memory.recompute import _with_policy
from weft.models import DecoderConfig, GPT2Config, build
from weft.models.loss import ExampleLoss, token_loss
from weft.models.loss_head import install_loss_head
from weft.parallel.apply import cost
from weft.plan import Memory, Plan, split_batch
from weft.plan import Tensor as TensorPlan
from weft.planner.predict import predict
from weft.profiling import Profile, peak_bytes, profile
from weft.run_file import load_run
from weft.step.examples import _profile_of

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import one_gpu

RESULTS = Path(one_gpu.__file__).parent / "results"
BACKEND = "aot_eager_decomp_partition"
LLAMA = DecoderConfig(
    vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
GPT2 = GPT2Config(vocab_size=256, n_positions=64, n_embd=64, n_layer=2, n_head=4, tie_word_embeddings=False)


class Transformers(nn.Module):
    """Blocks of transformers' Llama, called without the mask that it makes for fake tensors only."""

    def __init__(self) -> None:
        super().__init__()
        config = transformers.LlamaConfig(
            vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, use_cache=False,
        )  # fmt: skip
        whole = transformers.LlamaForCausalLM(config)
        self.embedding, self.layers, self.head = whole.model.embed_tokens, whole.model.layers, whole.lm_head
        self.rotary = whole.model.rotary_emb

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens)
        tables = self.rotary(hidden, torch.arange(tokens.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, position_embeddings=tables)
        logits: Tensor = self.head(hidden)
        return logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: build(LLAMA),
    "gpt2": lambda: build(GPT2),
    "transformers": Transformers,
}


def tokens(batch: int = 2, sequence: int = 32) -> Tensor:
    return torch.zeros(batch, sequence, dtype=torch.long)


def profiled(model: nn.Module, batch: int = 2, sequence: int = 32) -> Profile:
    given = tokens(batch, sequence)
    return profile(model, lambda: (given,), lambda logits: token_loss(logits, given)[0])


def compile_blocks(model: nn.Module) -> None:
    for block in find_blocks(model).values():
        block.forward = torch.compile(block.forward, backend=BACKEND, dynamic=False)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.sampled(2)
@pytest.mark.full(2)
def test_kept_bytes_are_those_of_compiled_blocks(name: str) -> None:
    model = MODELS[name]().to(torch.bfloat16)
    predicted = cost(compiled_profile(profiled(model)), Plan(), split_batch(Plan(), 2, 32)).saved_bytes
    compile_blocks(model)
    kept = saved_bytes([*model.parameters(), *model.buffers()], lambda: token_loss(model(tokens()), tokens()))
    assert predicted == kept


@pytest.mark.processes
@pytest.mark.parametrize(
    "plan",
    [
        pytest.param(Plan(tensor=TensorPlan(2, sequence=True)), marks=pytest.mark.soak),
        Plan(tensor=TensorPlan(2, sequence=True, regather=True)),
        Plan(memory=Memory("selective")),
    ],
)
def test_plans_share_what_compiled_blocks_keep(plan: Plan) -> None:
    measured = max(saved_bytes_of_ranks(MODELS["llama"], plan, (tokens(), tokens()), compile_blocks))
    found = compiled_profile(profiled(MODELS["llama"]()))
    assert cost(profile_under(found, plan), plan, split_batch(plan, 2, 32)).saved_bytes == pytest.approx(
        measured, rel=0.01
    )


def test_blocks_that_y_splits_count_as_uncompiled() -> None:
    eager = profiled(MODELS["llama"]().to(torch.bfloat16))
    assert profile_under(compiled_profile(eager), Plan(tensor=TensorPlan(1, 2))) is eager
    assert profile_under(eager, Plan(tensor=TensorPlan(1, 2))) is eager
    assert profile_under(compiled_profile(eager), Plan(tensor=TensorPlan(2))) is compiled_profile(eager)


@settings(max_examples=3)
@given(
    heads=st.sampled_from([2, 4, 8]),
    share=st.sampled_from([1, 2]),
    head_dim=st.sampled_from([8, 16, 32]),
    inner=st.integers(3, 300),
    sequence=st.integers(2, 80),
    batch=st.integers(1, 4),
)
def test_a_block_of_llama_keeps_its_matmuls_operands(
    heads: int, share: int, head_dim: int, inner: int, sequence: int, batch: int
) -> None:
    config = replace(
        LLAMA, hidden_size=heads * head_dim, head_dim=head_dim, num_attention_heads=heads, intermediate_size=inner,
        num_key_value_heads=heads // share, num_hidden_layers=2,
    )  # fmt: skip
    hidden, keys, rows = heads * head_dim, heads // share * head_dim, batch * sequence
    found = compiled_profile(profiled(build(config).to(torch.bfloat16), batch, sequence)).blocks[1]
    # Input, both normed inputs, query, what attention gives, what o_proj gives; K and V; gate, up and their product.
    per_row = 2 * (6 * hidden + 2 * keys + 3 * inner)
    per_row += 4 * (2 + heads)  # in float32: of each norm its root mean square, of each head the softmax's denominator
    assert (found.saved_bytes or {})["none"] == rows * per_row
    assert found.backward_bytes is not None
    assert found.backward_bytes >= rows * hidden * 2  # the gradient that it is given


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32, bias=False), nn.Linear(32, 8, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(hidden).relu())
        return out


def test_the_most_that_a_backward_holds() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layers = nn.Embedding(256, 8), nn.ModuleList([Mlp(), Mlp()])

        def forward(self, tokens: Tensor) -> Tensor:
            hidden: Tensor = self.embedding(tokens)
            for layer in self.layers:
                hidden = layer(hidden)
            return hidden

    found = compiled_profile(profile(Chain(), lambda: (tokens(),), lambda hidden: hidden.sum())).blocks[1]
    stream, inner = 64 * 8 * 4, 64 * 32 * 4
    assert (found.saved_bytes or {})["none"] == stream + inner + inner // 4  # the input, the ReLU's result, its signs
    # The gradient that it is given. The ReLU's result is gone when that of its gradient comes, which is written over.
    assert found.backward_bytes == stream


def test_what_cannot_be_traced_counts_as_uncompiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Partition:
        raise RuntimeError("a bad day")

    eager = profiled(MODELS["llama"]())
    monkeypatch.setattr(weft.compile.saved_bytes, "partition", fail)
    monkeypatch.setattr(weft.compile.saved_bytes, "_partition_cache", {})
    assert [block.saved_bytes for block in compiled_profile(eager).blocks] == [
        block.saved_bytes for block in eager.blocks
    ]


def test_a_block_that_cannot_be_traced_counts_as_uncompiled_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Partition:
        raise RuntimeError("Cannot re-initialize CUDA\nin a forked process")

    def save_input(*_: Any) -> Partition:
        return Partition((0,), {}, 0)

    run, gpu = load_run(write_run_file(tmp_path)), load("h200:1x1")
    monkeypatch.setattr(weft.compile.saved_bytes, "partition", save_input)
    monkeypatch.setattr(weft.compile.saved_bytes, "_partition_cache", {})
    predict_again = _profile_of.cache_clear
    predict_again()
    whole = predict(run, gpu)
    assert not whole.assumptions
    assert "assumptions" not in whole.to_json()
    monkeypatch.setattr(weft.compile.saved_bytes, "partition", fail)
    monkeypatch.setattr(weft.compile.saved_bytes, "_partition_cache", {})
    predict_again()
    found = predict(run, gpu)
    predict_again()
    assert found.cost.saved_bytes > whole.cost.saved_bytes
    (text,) = found.to_json()["assumptions"]
    assert text.startswith("block 'model.layers.0' and ")
    assert "could not be traced as compiled (RuntimeError: Cannot re-initialize CUDA)" in text


def test_predictions_are_of_compiled_blocks_where_a_run_compiles(tmp_path: Path) -> None:
    file = write_run_file(tmp_path)

    def saved(word: str | None, cluster: Cluster) -> int:
        return predict(load_run(file, [f"train.compile={word}"] if word else []), cluster).cost.saved_bytes

    gpu, cpu = load("h200:1x1"), local_cluster(1, on_cpu=True)
    assert saved(None, gpu) == saved("true", cpu)
    assert saved(None, cpu) == saved("false", gpu) > saved(None, gpu)


MEASURED = json.loads((RESULTS / "one-gpu-h200.json").read_text())["results"]


@pytest.mark.parametrize(
    ("shape", "name"),
    one_in(
        6,
        {f"{shape} {name}": (shape, name) for shape in MEASURED for name in MEASURED[shape] if name in one_gpu.PLANS},
    ),
)
@pytest.mark.full
def test_memory_on_an_h200_is_predicted_within_5_percent(shape: str, name: str) -> None:
    predicted = one_gpu.predicted_bytes(name, one_gpu.CASES[shape])
    assert predicted == pytest.approx(MEASURED[shape][name]["gpu_bytes"], rel=0.05)


def test_the_peaks_of_the_root_beside_compiled_blocks_are_those_of_a_run_under_each_policy() -> None:
    """They are measured once, with one block of each kind and without recompute."""
    with torch.device("meta"):
        model = build(replace(LLAMA, num_hidden_layers=2)).to(torch.bfloat16)
    install_loss_head(model)
    found = compiled_profile(profile(model, lambda: (tokens(),), ExampleLoss(tokens)))
    assert found.source is not None
    assert found.source.eager is not None
    for policy in ("none", "selective", "full"):
        wrap = partial(_with_policy, policy, preserve_rng_state=False)
        ran = peak_bytes._run(found.source.eager, policy, wrap, is_loss_fused=True)
        expected = peak_bytes._with_compiled_blocks(ran, found.source.blocks)
        assert peak_bytes.peaks(found, policy, wrap) == expected
