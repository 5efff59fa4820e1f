"""Axes x and y: every grid against the unsplit model, the formulas by hand, memory, the vocabulary, and refusals.

A covering sample of grids × models × policies runs always, the full product with `-m soak`. The negative controls break
one thing each, in the parent before the ranks are forked, and the report must say so.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import tensor_for_tests as shared
import torch
from nets_for_tests import net
from sampled_for_tests import one_in
from tensor_for_tests import ALL, OWN, SHIPPED, TRANSFORMERS, WIDTH, check, counted, decoder, failures, made
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.comm import Axis, Ledger
from weft.errors import PlanError
from weft.inspection import split_probe as probe
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import GPT2Config, ModelConfig
from weft.models.loss_head import logits_of
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.tensor import axis as tensor
from weft.parallel.tensor import cuts as tensor_cuts
from weft.parallel.tensor import norm as tensor_norm
from weft.parallel.tensor import operations as tensor_ops
from weft.parallel.tensor import overlapped_matmul as region
from weft.parallel.tensor import vocabulary
from weft.parallel.tensor.axis import TensorAxes
from weft.parallel.tensor.cost import localise, traffic
from weft.parallel.tensor.split_linear import SplitLinear
from weft.parallel.tensor.vocabulary import Vocabulary, cross_entropy
from weft.plan import Context, Memory, Plan, Recompute, Shard, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import verify
from weft.sharding.layout import flat_layouts
from weft.step.objective import CROSS_ENTROPY, Objective
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch


def grid(
    x: int = 1,
    y: int = 1,
    shard: int = 1,
    data: int = 1,
    sequence: bool = False,
    regather: bool = False,
    chunks: int = 1,
    **others: Any,
) -> Plan:
    """A plan over the four axes; the stage of `shard` changes with the grid."""
    stage: Any = 1 + (x + y + data) % 3
    return Plan(data=data, shard=Shard(shard, stage), tensor=TensorPlan(x, y, sequence, regather, chunks), **others)


# --- the oracle: a sample that covers each grid, model, policy and switch with several others

CASES: dict[str, tuple[str, Plan, float | None]] = {
    "x 2": ("tied", grid(2), 1.0),
    "x 2, sequence": ("biased", grid(2, sequence=True), None),
    "x 2, regather over micro-batches": ("gpt2", grid(2, sequence=True, regather=True, micro_batch=2), 0.1),
    "x 2, regather": ("two key heads", grid(2, sequence=True, regather=True), 1.0),
    "x 2 × y 2, regather": ("tied", grid(2, 2, sequence=True, regather=True), 1.0),
    "x 2, full": ("one key head", grid(2, memory=Memory("full")), 1.0),
    "x 2, sequence, selective": ("gpt2", grid(2, sequence=True, memory=Memory("selective")), 1.0),
    "x 2, sequence, full": ("tied", grid(2, sequence=True, memory=Memory("full"), micro_batch=4), 1.0),
    "x 2, 2 chunks": ("gpt2", grid(2, sequence=True, chunks=2), 1.0),
    "x 2, 4 chunks": ("tied", grid(2, sequence=True, chunks=4, micro_batch=2), 0.1),
    "x 2, 4 chunks, regather": ("biased", grid(2, sequence=True, regather=True, chunks=4), 1.0),
    "x 2, 4 chunks, full": ("two key heads", grid(2, sequence=True, chunks=4, memory=Memory("full")), 1.0),
    "x 2, 2 chunks, selective": ("one key head", grid(2, sequence=True, chunks=2, memory=Memory("selective")), 1.0),
    "x 4, 2 chunks": ("window", grid(4, sequence=True, chunks=2), 1.0),
    "x 2 × y 2, 2 chunks": ("gpt2", grid(2, 2, sequence=True, chunks=2), 1.0),
    "x 2 × shard 2, 4 chunks": ("tied", grid(2, 1, 2, sequence=True, chunks=4), 1.0),
    "y 2": ("gpt2", grid(1, 2), 1.0),
    "y 2, selective": ("tied", grid(1, 2, memory=Memory("selective")), None),
    "x 4": ("two key heads", grid(4), 1e-3),
    "x 4, sequence, window": ("window", grid(4, sequence=True), 1.0),
    "x 2 × y 2": ("biased", grid(2, 2, micro_batch=4), 1.0),
    "x 2 × y 2, sequence": ("one key head", grid(2, 2, sequence=True, memory=Memory("full")), 1.0),
    "y 4": ("one key head", grid(1, 4), 1.0),
    "x 2 × shard 2": ("gpt2", grid(2, 1, 2, micro_batch=1), 1.0),
    "x 2 × data 2": ("tied", grid(2, 1, 1, 2, sequence=True, regather=True, micro_batch=2), 1.0),
    "y 2 × shard 2": ("biased", grid(1, 2, 2, memory=Memory("full")), 1.0),
    "x 8": ("one key head", grid(8, sequence=True, regather=True), 1.0),
    "x 4 × y 2": ("two key heads", grid(4, 2), 1.0),
    "x 2 × y 2 × shard 2": ("tied", grid(2, 2, 2, micro_batch=2), 1.0),
    "x 2 × y 2 × shard 2, sequence": ("gpt2", grid(2, 2, 2, sequence=True, memory=Memory("selective")), 1.0),
    "x 2 × shard 2 × data 2": ("one key head", grid(2, 1, 2, 2, sequence=True, micro_batch=1), 1.0),
    "y 2 × shard 2 × data 2": ("tied", grid(1, 2, 2, 2), None),
}


@pytest.mark.parametrize(("name", "plan", "clip"), one_in(3, CASES))
@pytest.mark.sampled(3)
def test_shipped_models(name: str, plan: Plan, clip: float | None) -> None:
    check(name, plan, clip).require()


@pytest.mark.parametrize(
    ("kind", "plan"),
    [
        ("Llama", grid(2, 2, micro_batch=4)),
        ("Llama", grid(4, sequence=True, chunks=2)),
        ("Mistral", grid(2, 1, 2, sequence=True, regather=True)),
        ("Qwen2", grid(2, 2, sequence=True, memory=Memory("full"))),
        ("GPT2", grid(2, 1, 1, 2, memory=Memory("selective"))),
        ("GPT2", grid(2, 2, sequence=True)),
    ],
)
@pytest.mark.sampled(3)
def test_transformers_models(kind: str, plan: Plan, monkeypatch: Patch) -> None:
    shared.with_exact_norms(monkeypatch)
    check(kind, plan).require()


@pytest.mark.parametrize(
    "plan",
    [
        grid(2, micro_batch=4),
        grid(4, sequence=True),
        grid(2, sequence=True, chunks=2),
        grid(2, 1, 2, memory=Memory("full")),
    ],
    ids=Plan.describe_axes,
)
@pytest.mark.sampled(3)
def test_a_vision_transformer_of_ones_own(plan: Plan) -> None:
    check("vit", plan).require()


@pytest.mark.parametrize(
    "plan", [grid(2), grid(4, 1, 1, 2), grid(2, 1, 2, memory=Memory("full"))], ids=Plan.describe_axes
)
def test_a_chain_of_linears(plan: Plan) -> None:
    check("chain", plan).require()


FROZEN = {
    "first block": ("model.embed_tokens", "model.layers.0."),
    "a column and a row": ("model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.o_proj"),
    "all but one norm": ("model.layers.0", "model.layers.1.self_attn", "model.layers.1.mlp"),
}


@pytest.mark.parametrize("frozen", FROZEN.values(), ids=FROZEN.keys())
@pytest.mark.parametrize(
    "plan",
    [grid(2, sequence=True), grid(2, sequence=True, regather=True, chunks=2), grid(2, 2, memory=Memory("full"))],
    ids=Plan.describe_axes,
)
@pytest.mark.sampled(4)
def test_frozen_parts(frozen: tuple[str, ...], plan: Plan) -> None:
    check("", plan, make=made(decoder(num_key_value_heads=4), *frozen)).require()


def blocks(forward: Callable[..., Tensor], block: Callable[[], nn.Module] = shared.MLP) -> nn.Module:
    """Two blocks between a linear of patches and a head."""
    layers = nn.ModuleList(block() for _ in range(2))
    return net(forward, enter=nn.Linear(12, WIDTH), layers=layers, head=nn.Linear(WIDTH, 5))


def repeated() -> nn.Module:
    """A block that is called again after another."""

    def forward(self: Any, patches: Tensor) -> Tensor:
        hidden = self.enter(patches)
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            hidden = layer(hidden)
        return self.head(hidden[:, 0])

    return blocks(forward)


def once(block: Callable[[], nn.Module] = shared.MLP) -> nn.Module:
    """Blocks that are themselves what is paired."""
    return blocks(lambda self, patches: self.head(self.layers[1](self.layers[0](self.enter(patches)))[:, 0]), block)


def image_batch(step: int) -> tuple[Tensor, Tensor]:
    """Eight patches, no class token."""
    patches, labels = shared.image_batch(step)
    return torch.cat([patches, patches[:, :1]], 1), labels


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize(
    "plan", [grid(2), grid(2, sequence=True, chunks=2), grid(2, 1, 2, sequence=True)], ids=Plan.describe_axes
)
def test_blocks_that_are_pairs_themselves(plan: Plan, recompute: Recompute) -> None:
    verify(once, image_batch, replace(plan, memory=Memory(recompute)), steps=2).require()


def normed() -> nn.Module:
    """Blocks that end with a norm, whose input backward needs: recompute puts the last result together again."""

    def block() -> nn.Module:
        return net(
            lambda self, hidden: self.norm(hidden + self.mlp(hidden)), mlp=shared.MLP(), norm=nn.LayerNorm(WIDTH)
        )

    return once(block)


def layers_alone() -> nn.Module:
    """Blocks that are an embedding and linears themselves: recompute stops before their results are put together."""
    pair_of = [nn.Linear(WIDTH, 24), nn.GELU(), nn.Linear(24, WIDTH)]
    return nn.Sequential(nn.Embedding(shared.VOCABULARY, WIDTH), *pair_of, nn.Linear(WIDTH, 64))


@pytest.mark.parametrize("recompute", ["selective", "full"])
def test_recompute_puts_together_again_only_what_backward_needs(recompute: Recompute) -> None:
    verify(normed, image_batch, grid(2, memory=Memory(recompute)), steps=2).require()
    verify(layers_alone, shared.token_batch, grid(2, memory=Memory(recompute)), steps=2).require()


def test_a_block_that_is_called_twice() -> None:
    verify(repeated, shared.image_batch, grid(2), steps=2).require()


def test_two_forwards_before_one_backward() -> None:
    def total(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
        passes = [logits_of(model(tokens)) for tokens in (batch[0], batch[0].flip(1))]
        return sum(
            (cross_entropy(logits, batch[1], vocabulary.vocabulary_of(model))[0] for logits in passes), torch.zeros(())
        )

    objective = Objective(CROSS_ENTROPY.count, total, splits_logits=True)
    with pytest.raises(PlanError, match="one loss calls the model 2 times, and the profile counted 1"):
        verify(SHIPPED["tied"], shared.token_batch, grid(2), objective=objective)


def test_bf16_computes_about_the_same() -> None:
    def rank(index: int) -> list[float]:
        plan = grid(2, sequence=True, precision="bf16")
        mesh = Mesh(plan)
        model = parallelize(SHIPPED["tied"](), plan, mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return [train_step(model, optimizer, [shared.token_batch(0)], mesh).loss.item() for _ in range(4)]

    model = SHIPPED["tied"]()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    alone = Mesh(Plan())
    expected = [train_step(model, optimizer, [shared.token_batch(0)], alone).loss.item() for _ in range(4)]
    for found in run_local(rank, 2):
        assert found == pytest.approx(expected, rel=2e-2)
        assert found[-1] < found[0]


# --- negative controls


def broken(name: str, plan: Plan, make: Callable[[], nn.Module] | None = None, steps: int = 1) -> set[str]:
    """What the report found wrong; something must be."""
    found = failures(check(name, plan, make=make, steps=steps))
    assert found
    return found


def skipped_sum_of_input_gradients(patch: Patch) -> None:
    patch.setattr(region, "all_reduce", lambda tensor, axis: counted(axis, "all_reduce", tensor))


def skipped_sum_of_partial_results(axis: str, patch: Patch) -> None:
    leave = tensor_ops._LEAVE

    def forward(value: Tensor, over: Axis) -> Tensor:
        if over.name != axis:
            return leave.forward(value, over)
        counted(over, "all_reduce", value)
        return value.clone()

    patch.setattr(tensor_ops, "_LEAVE", replace(leave, forward=forward))


def unsummed_key_heads(patch: Patch) -> None:
    patch.setattr(Mesh, "neighbours", lambda self, name, degree: Axis(name, 1, 0, None, Ledger()))


def unsummed_gradients_inside_regions(patch: Patch) -> None:
    other = tensor_cuts._CutMaker._other

    def forgetful(self: Any, name: str, shape: tuple[int, ...]) -> Any:
        cut = other(self, name, shape)
        return replace(cut, sums=()) if name in self.pairing.inner else cut

    patch.setattr(tensor_cuts._CutMaker, "_other", forgetful)


def summed_gradients_outside_regions(patch: Patch) -> None:
    other = tensor_cuts._CutMaker._other
    patch.setattr(tensor_cuts._CutMaker, "_other", lambda *given: replace(other(*given), sums=("x",)))


def unsummed_norms(patch: Patch) -> None:
    patch.setattr(tensor_cuts._CutMaker, "_outside_sums", lambda self, name: ())


def unsummed_last_norm(patch: Patch) -> None:
    sums, forget = tensor_cuts._CutMaker._outside_sums, {"model.norm.weight": ()}
    forgetful = lambda self, name: forget[name] if name in forget else sums(self, name)  # noqa: E731
    patch.setattr(tensor_cuts._CutMaker, "_outside_sums", forgetful)


def bias_that_every_rank_of_x_adds_before_the_sum(patch: Patch) -> None:
    def row(self: Any, value: Tensor) -> Tensor:
        return tensor_ops.leave(value @ self.module.weight.t() + self.module.bias, self.x)

    patch.setattr(SplitLinear, "row", row)


def wrong_offset_of_the_vocabulary(patch: Patch) -> None:
    def shifted(begin: int, end: int, num_classes: int, axis: Axis) -> Vocabulary:
        return Vocabulary(begin + axis.index, end + axis.index, num_classes, axis)

    patch.setattr(tensor, "Vocabulary", shifted)


def wrong_offset_of_the_embedding(patch: Patch) -> None:
    def shifted(module: nn.Embedding, tokens: Tensor, begin: int) -> Tensor:
        return vocabulary.split_embedding(module, tokens, begin + (begin > 0))

    patch.setattr(tensor, "split_embedding", shifted)


def input_that_is_gathered_again_in_the_wrong_order(patch: Patch) -> None:
    backward = region._GatheredColumns.backward

    def turned(ctx: Any, *gradients: Tensor) -> Any:
        with pytest.MonkeyPatch.context() as inside:
            wait = region._Gathering.wait
            inside.setattr(region._Gathering, "wait", lambda self: wait(self).flip(1))
            return backward(ctx, *gradients)

    patch.setattr(region._GatheredColumns, "backward", staticmethod(turned))


def pieces_in_the_wrong_order(part: str, patch: Patch) -> None:
    original = getattr(region, part)

    def swapped(pieces: Any, *others: int) -> Tensor:
        return original(pieces[::-1]) if part == "_join" else original(pieces, *others).flip(0)

    patch.setattr(region, part, swapped)


def moments_that_are_not_summed_over_y(patch: Patch) -> None:
    norm = tensor_norm.split_norm
    patch.setattr(tensor, "split_norm", lambda module, axis, hidden: norm(module, replace(axis, degree=1), hidden))


# What breaks, the model, the plan and what must be found wrong. Where the ledger cannot help, it must not.
FAULTS: list[tuple[Callable[[Patch], None], str, Plan, str, bool]] = [
    (skipped_sum_of_input_gradients, "tied", grid(2), "worst gradient", False),
    (partial(skipped_sum_of_partial_results, "x"), "tied", grid(2, 2), "loss", False),
    (partial(skipped_sum_of_partial_results, "y"), "tied", grid(2, 2), "loss", False),
    (unsummed_key_heads, "one key head", grid(2), "worst gradient", True),
    (unsummed_gradients_inside_regions, "one key head", grid(2), "worst gradient", False),  # norms of heads
    (unsummed_gradients_inside_regions, "vit", grid(2), "worst gradient", False),  # a number between two linears
    (summed_gradients_outside_regions, "tied", grid(2), "worst gradient", True),
    (unsummed_norms, "tied", grid(2, sequence=True), "worst gradient", False),
    (unsummed_last_norm, "tied", grid(2, sequence=True), "worst gradient", False),
    (bias_that_every_rank_of_x_adds_before_the_sum, "biased", grid(2), "loss", False),
    (wrong_offset_of_the_vocabulary, "tied", grid(2), "loss", False),
    (wrong_offset_of_the_embedding, "two key heads", grid(2), "loss", True),
    (
        input_that_is_gathered_again_in_the_wrong_order,
        "tied",
        grid(2, sequence=True, regather=True),
        "worst gradient",
        False,
    ),
    (partial(pieces_in_the_wrong_order, "_join"), "tied", grid(2, sequence=True, chunks=2), "worst gradient", False),
    (partial(pieces_in_the_wrong_order, "_pieces"), "tied", grid(2, sequence=True, chunks=2), "worst gradient", False),
    (moments_that_are_not_summed_over_y, "gpt2", grid(1, 2), "loss", True),
]


@pytest.mark.parametrize(("fault", "name", "plan", "found", "may_be_counted"), FAULTS)
def test_faults_are_found(
    fault: Callable[[Patch], None], name: str, plan: Plan, found: str, may_be_counted: bool, monkeypatch: Patch
) -> None:
    fault(monkeypatch)
    wrong = broken(name, plan, steps=2 if name == "biased" else 1)  # biases begin at zero
    assert found in wrong
    assert may_be_counted or not any(what.startswith("traffic") for what in wrong)


def test_finds_a_split_that_names_alone_would_allow(monkeypatch: Patch) -> None:
    # What the probe is for: it finds that heads are interleaved. Switched off, they are split as if they were stacked.
    class Interleaved(shared.Attention):
        def forward(self, hidden: Tensor) -> Tensor:
            heads = self.qkv(self.norm(hidden)).unflatten(-1, (self.num_heads, 3, self.head_dim))
            query, key, value = heads.permute(3, 0, 2, 1, 4)
            mixed = torch.nn.functional.scaled_dot_product_attention(self.head_norm(query), key, value)
            return hidden + self.gamma * self.proj(mixed.transpose(1, 2).flatten(2))

    monkeypatch.setattr(shared, "Attention", Interleaved)
    check("vit", grid(2)).require()
    monkeypatch.setattr(probe, "_equal", lambda found, expected: True)
    assert "loss" in broken("vit", grid(2))


# --- traffic by hand


def test_formulas_of_a_pair_by_hand() -> None:
    hidden, tokens, x, y = 8, 6, 2, 4
    first, second = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    pair = net(lambda self, value: self.fc2(torch.relu(self.fc1(value))), fc1=first, fc2=second)
    found = profile(pair, lambda: (torch.zeros(1, tokens, hidden, requires_grad=True),))
    calls = sorted(traffic(found, grid(x, y), 0))
    # fc1, a column with k = H, n = 4H: dI of m·k/y over x, O of m·n/x over y.
    # fc2, a row with k = 4H, n = H (AxoNN's paper writes its n for its k): O of m·n/y over x, dI of m·k/x over y.
    assert calls == sorted(
        [
            (("x", "all_reduce"), tokens * hidden // y * 4),
            (("y", "all_reduce"), tokens * 4 * hidden // x * 4),
            (("x", "all_reduce"), tokens * hidden // y * 4),
            (("y", "all_reduce"), tokens * 4 * hidden // x * 4),
        ]
    )


def test_traffic_of_a_decoder_layer_by_hand() -> None:
    batch, sequence, x = 2, 8, 2
    config = decoder(num_hidden_layers=1, num_key_value_heads=4)
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    found = profile(made(config)(), lambda: (tokens,))
    stream = batch * sequence * WIDTH * 4
    embedding, loss = stream, [batch * sequence * 4, 2 * batch * sequence * 4]
    # q, k, v enter once, gate and up enter once; o and down leave; the head enters.
    expected = [embedding, stream, stream, stream, stream, stream, *loss]
    assert sorted(size for _, size in traffic(found, grid(x), 0)) == sorted(expected)
    for regather in (False, True):
        parts = list(traffic(found, grid(x, sequence=True, regather=regather), 0))
        # In each of two regions: I gathered, dI scattered; O scattered, dO gathered. The head: I gathered, dI
        # scattered. The embedding: O scattered, dO gathered. `regather`: I of each region gathered again for dW.
        assert sorted(size for key, size in parts if key == ("x", "all_reduce")) == loss
        assert [size for key, size in parts if key == ("x", "all_gather")] == [stream] * (6 + 3 * regather)
        assert [size for key, size in parts if key == ("x", "reduce_scatter")] == [stream] * 6
        chunked = list(traffic(found, grid(x, sequence=True, regather=regather, chunks=4), 0))
        # The ends of the chain are not cut: the embedding's result is scattered and its gradient gathered at once.
        gathered = [size for key, size in chunked if key == ("x", "all_gather")]
        assert sorted(gathered) == [stream // 4] * 4 * (5 + 3 * regather) + [stream]
        scattered = [size for key, size in chunked if key == ("x", "reduce_scatter")]
        assert sorted(scattered) == [stream // 4] * 4 * 5 + [stream]
        assert sum(size for _, size in chunked) == sum(size for _, size in parts)
    # GPT-2 adds positions to its embedding, so both are summed whole, and parted after.
    found = profile(
        made(GPT2Config(vocab_size=61, n_positions=11, n_embd=WIDTH, n_layer=1, n_head=8))(), lambda: (tokens,)
    )
    parts = list(traffic(found, grid(x, sequence=True), 0))
    positions = sequence * WIDTH * 4
    assert sorted(size for key, size in parts if key == ("x", "all_reduce")) == sorted([embedding, positions, *loss])
    assert [size for key, size in parts if key == ("x", "all_gather")] == [stream] * 6
    assert [size for key, size in parts if key == ("x", "reduce_scatter")] == [stream] * 5


# --- weights stay where they are


@pytest.mark.parametrize(("x", "y", "shard"), [(2, 2, 2), (4, 2, 1), (1, 2, 4), (8, 1, 1)])
def test_each_rank_holds_kn_over_x_y_shard_of_every_matmul(x: int, y: int, shard: int) -> None:
    plan = Plan(shard=Shard(shard, 3), tensor=TensorPlan(x, y))
    found = profile(made(decoder())())
    for at in ({"x": i, "y": j, "shard": 0} for i in range(x) for j in range(y)):
        local = localise(found, plan, at)
        for whole, part in zip(found.blocks, local.blocks, strict=True):
            weights = [p for p in whole.parameters if len(p.shape) == 2]
            assert {p.name: p.numel for p in part.parameters if len(p.shape) == 2} == {
                p.name: p.numel // (x * y) for p in weights
            }
            layouts = flat_layouts([p for p in part.parameters if len(p.shape) == 2], shard)
            assert sum(lay.slice_numel for lay in layouts) == sum(p.numel for p in weights) // (x * y * shard)


def test_flops_go_over_x_and_y_but_attention_over_x_only() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = profile(made(decoder())(), lambda: (tokens,))
    local = localise(found, grid(2, 2), {"x": 0, "y": 0})
    for whole, part in zip(found.blocks, local.blocks, strict=True):
        matmuls = whole.flops - whole.attention_flops
        assert part.flops == matmuls // 4 + whole.attention_flops // 2
        assert part.attention_flops == whole.attention_flops // 2


# --- activations

MEMORY_MODELS: dict[str, ModelConfig] = {
    "decoder": decoder(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_key_value_heads=4, num_hidden_layers=4
    ),
    "gpt2": GPT2Config(vocab_size=256, n_positions=32, n_embd=64, n_layer=4, n_head=8),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", one_in(2, MEMORY_MODELS.keys()))
def test_saved_bytes_fall_as_predicted(name: str) -> None:
    config, batch, sequence = MEMORY_MODELS[name], 4, 32
    found: dict[tuple[int, int, str], int] = {}
    kinds: dict[str, dict[str, Any]] = {"": {}, "sequence": {"sequence": True, "chunks": 2}}
    kinds["regather"] = {"sequence": True, "regather": True}
    for x, y, kind in [(1, 1, ""), *itertools.product((2, 4), (1,), kinds), (2, 2, "sequence"), (2, 2, "regather")]:
        plan = grid(x, y, **kinds[kind])
        measured = max(shared.measured_saved_bytes(config, plan, batch, sequence))
        predicted = shared.predicted_saved_bytes(config, plan, batch, sequence)
        assert predicted == pytest.approx(measured, rel=0.05), plan.describe_axes()
        found[x, y, kind] = measured
    whole = found[1, 1, ""]
    assert whole > found[2, 1, ""] > found[4, 1, ""]
    for x, y in ((2, 1), (4, 1)):
        assert found[x, y, ""] > found[x, y, "sequence"] > found[x, y, "regather"]
    assert found[2, 1, "sequence"] > found[2, 2, "sequence"] > found[2, 2, "regather"]
    # Without `sequence` the stream stays whole, with it what enters the regions; with `regather` a rank keeps 1/x.
    assert found[4, 1, ""] > 1.25 * whole / 4
    for x in (2, 4):
        assert found[x, 1, "regather"] == pytest.approx(whole / x, rel=0.1)


@pytest.mark.parametrize("plan", [grid(2), grid(2, 2, sequence=True)], ids=Plan.describe_axes)
def test_saved_bytes_with_recompute_and_in_bf16(plan: Plan) -> None:
    config = MEMORY_MODELS["decoder"]
    for changed in (replace(plan, memory=Memory("full")), replace(plan, precision="bf16")):
        measured = max(shared.measured_saved_bytes(config, changed, 4, 32))
        assert shared.predicted_saved_bytes(config, changed, 4, 32) == pytest.approx(measured, rel=0.05)


# --- no rank ever holds whole logits


class Watch(TorchDispatchMode):
    """Remembers every floating tensor that has a dim of the whole vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves((args, kwargs, result)):
            if isinstance(leaf, Tensor) and leaf.is_floating_point() and shared.VOCABULARY in leaf.shape:
                self.found.append(f"{func} {tuple(leaf.shape)}")
        return result


@pytest.mark.parametrize("name", ["tied", "one key head", "gpt2"])
@pytest.mark.parametrize("x", [1, 4])
@pytest.mark.sampled(3)
def test_no_rank_holds_whole_logits(name: str, x: int) -> None:
    def rank(index: int) -> list[str]:
        plan = grid(x, 1, 2, sequence=x > 1)
        mesh = Mesh(plan)
        model = parallelize(SHIPPED[name](), plan, mesh)
        optimizer = torch.optim.AdamW(model.parameters())
        watch = Watch()
        with watch:
            train_step(model, optimizer, [shared.token_batch(0)], mesh)
        return watch.found

    found = run_local(rank, 2 * x)
    assert all(bool(tensors) == (x == 1) for tensors in found), found  # with x = 1 they are there, so the watch works


def test_labels_and_tokens_outside_the_vocabulary_are_not_passed_over() -> None:
    def rank(index: int) -> list[list[float]]:
        plan = grid(2)
        model = parallelize(SHIPPED["tied"](), plan, Mesh(plan))
        tokens, labels = shared.token_batch(0)
        beyond = torch.full_like(tokens, shared.VOCABULARY)
        below = torch.full_like(tokens, -1)
        found = []
        for batch in ((tokens, labels), (tokens, beyond), (tokens, below), (beyond, labels)):
            total = CROSS_ENTROPY.total(model, batch)
            model.zero_grad()
            total.backward()
            gradients = [piece.grad for piece in model.parameters() if piece.grad is not None]
            found.append([float(total.detach().isnan()), float(any(bool(one.isnan().any()) for one in gradients))])
        return found

    assert run_local(rank, 2) == [[[0.0, 0.0], [1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]] * 2


def test_logits_of_another_linear_than_the_last_are_refused() -> None:
    alone = Vocabulary(0, 31, 61, Axis("x", 2, 0, None, Ledger()))
    with pytest.raises(PlanError, match=r"the logits have 5 classes, but this rank's part .* has 31 of 61"):
        cross_entropy(torch.zeros(2, 3, 5), torch.zeros(2, 3, dtype=torch.long), alone)


# --- dropout


def dropping() -> nn.Module:
    """Dropout in the stream, and between the linears of an MLP."""

    def block() -> nn.Module:
        mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Dropout(0.5), nn.Linear(32, WIDTH))
        return net(lambda self, hidden: hidden + self.drop(self.mlp(hidden)), mlp=mlp, drop=nn.Dropout(0.5))

    return once(block)


def dropped(plan: Plan) -> list[dict[str, Any]]:
    """What each rank dropped, and its gradients."""

    def rank(index: int) -> dict[str, Any]:
        torch.manual_seed(0)
        model = parallelize(dropping().double(), plan, Mesh(plan))
        masks: dict[str, list[bool]] = {}

        def watch(name: str, _: nn.Module, __: Any, out: Tensor) -> None:
            masks.setdefault(name, (out == 0).flatten().tolist())

        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                module.register_forward_hook(partial(watch, name))
        torch.manual_seed(7)
        patches = torch.randn(4, 8, 12, generator=torch.Generator().manual_seed(1)).double()
        loss = cross_entropy(model(patches), torch.zeros(4, dtype=torch.long), vocabulary.vocabulary_of(model))[0]
        loss.backward()
        gradients = [float(piece.grad.abs().sum()) for piece in model.parameters() if piece.grad is not None]
        return {"masks": masks, "gradients": gradients, "after": torch.rand(()).item()}

    return run_local(rank, plan.num_ranks)


def test_ranks_of_x_drop_alike_in_the_stream_and_apart_inside_regions() -> None:
    left, right = dropped(grid(2))
    for layer in (0, 1):
        stream, inside = f"layers.{layer}.drop", f"layers.{layer}.mlp.2"
        assert left["masks"][stream] == right["masks"][stream]
        assert 0.3 < sum(left["masks"][stream]) / len(left["masks"][stream]) < 0.7
        assert left["masks"][inside] != right["masks"][inside]
    assert left["after"] == right["after"]


def test_with_sequence_ranks_of_x_drop_apart_in_the_stream_too() -> None:
    left, right = dropped(grid(2, sequence=True))
    assert left["masks"]["layers.0.drop"] != right["masks"]["layers.0.drop"]
    assert left["after"] == right["after"]


def test_ranks_of_y_drop_alike_inside_regions() -> None:
    model = made(GPT2Config(vocab_size=61, n_positions=8, n_embd=WIDTH, n_layer=2, n_head=8, attn_pdrop=0.5))

    def rank(index: int) -> float:
        plan = grid(1, 2)
        mesh = Mesh(plan)
        model_here = parallelize(model(), plan, mesh)
        torch.manual_seed(7)
        return float(CROSS_ENTROPY.total(model_here, shared.token_batch(0)).detach())

    left, right = run_local(rank, 2)
    assert left == pytest.approx(right, rel=1e-6)


def test_recompute_drops_again_what_was_dropped() -> None:
    plan = grid(2)
    kept, computed = dropped(plan), dropped(replace(plan, memory=Memory("full")))
    for left, right in zip(kept, computed, strict=True):
        assert left["gradients"] == pytest.approx(right["gradients"], rel=1e-12)


# --- bad input


def reason(make: Callable[[], nn.Module], plan: Plan, inputs: Callable[[], Tensor] | None = None) -> str:
    """Why a plan is refused."""
    found = profile(make(), None if inputs is None else lambda: (inputs(),))
    with pytest.raises(PlanError) as error:
        refuse(found, plan)
    return str(error.value)


@pytest.mark.parametrize(
    ("make", "plan", "words"),
    [
        (
            made(decoder(hidden_size=12, num_attention_heads=6, num_key_value_heads=6)),
            grid(4),
            "tensor.x = 4 does not divide the 6 heads of 'model.layers.0.self_attn.q_proj'; use 1, 2, 3 or 6",
        ),
        (
            made(decoder(num_attention_heads=4, num_key_value_heads=4, intermediate_size=22)),
            grid(4),
            "tensor.x = 4 does not divide the 22 features of 'model.layers.0.mlp.gate_proj'; use 1, 2, 11 or 22",
        ),
        (
            made(decoder(hidden_size=12, num_attention_heads=6, num_key_value_heads=2)),
            grid(3),
            "tensor.x = 3 and the 2 key-value heads of 'model.layers.0.self_attn.k_proj' do not divide each other; "
            "use 1 or 2 or a multiple of 2",
        ),
        (
            made(decoder(vocab_size=3)),
            grid(4),
            "tensor.x = 4 is more than the 3 outputs of 'lm_head'",
        ),
        (
            made(decoder(hidden_size=6, num_attention_heads=3, intermediate_size=9)),
            grid(1, 4),
            "tensor.y = 4 does not divide the 6 features of 'lm_head'; use 1, 2, 3 or 6",
        ),
        (
            shared.ViT,
            grid(1, 2),
            "tensor.y = 2, but 'patch' has no partner to be paired with, and y needs pairs; use y = 1",
        ),
        (
            shared.MLP,
            grid(2, sequence=True),
            "tensor.sequence = true works between blocks, and the model has none; use false",
        ),
        (
            shared.chain,
            grid(2, sequence=True),
            "tensor.sequence = true works inside blocks, but '0' is a block and a single linear; use false",
        ),
    ],
)
def test_sizes_that_do_not_divide(make: Callable[[], nn.Module], plan: Plan, words: str) -> None:
    assert reason(make, plan) == words


def test_sequences_that_x_does_not_divide() -> None:
    make, plan = made(decoder()), grid(4, sequence=True)
    assert reason(make, plan, lambda: torch.zeros(1, 6, dtype=torch.long)) == (
        "tensor.sequence = true splits the 6 tokens that a rank has of each sequence over x = 4; use a sequence that "
        "it divides, or tensor.sequence = false"
    )
    plan = replace(plan, context=Context(2))
    assert "splits the 6 tokens" in reason(make, plan, lambda: torch.zeros(1, 12, dtype=torch.long))
    plan = grid(2, sequence=True, chunks=4)
    assert reason(make, plan, lambda: torch.zeros(1, 12, dtype=torch.long)) == (
        "tensor.chunks = 4 does not divide the 6 tokens that a rank of x = 2 has of each sequence; use 1, 2, 3 or 6"
    )


def test_sequences_that_x_does_not_divide_in_a_model_of_ones_own() -> None:
    def rank(index: int) -> str:
        errors = []
        for chunks, num_patches in ((1, 7), (2, 6), (1, 8)):
            plan = grid(2, sequence=True, chunks=chunks)
            model = parallelize(repeated(), plan, Mesh(plan))
            with pytest.raises(PlanError) as error:
                model(torch.zeros(1, num_patches, 12))
            errors.append(str(error.value))
        return " | ".join(errors)

    for found in run_local(rank, 2):
        odd, cut, twice = found.split(" | ")
        assert odd == (
            "tensor.sequence = true splits [batch, sequence, features] over x = 2, but the first block got [1, 7, 16]; "
            "use a sequence that 2 divides, or tensor.sequence = false"
        )
        assert "over x = 2 × chunks = 2, but the first block got [1, 6, 16]; use a sequence that 4 divides" in cut
        assert twice.startswith("the first block was called twice in one forward")


def test_more_chains_than_one_with_sequence() -> None:
    def two() -> nn.Module:
        chains = {name: nn.ModuleList([shared.Layer()]) for name in ("encoder", "decoder")}
        return net(lambda self: None, **chains)

    assert reason(two, grid(2, sequence=True)) == (
        "tensor.sequence = true splits the sequence along one chain of blocks, and the model has 2 (decoder, encoder); "
        "use false"
    )
    assert TensorAxes().refuse(profile(two()), grid(2)) is None


def test_what_mixes_features_is_refused_over_y() -> None:
    def model() -> nn.Module:
        def unit_length(self: Any, hidden: Tensor) -> Tensor:
            return torch.nn.functional.normalize(hidden, dim=-1) * self.weight

        norm = net(unit_length, "UnitLengthNorm", weight=nn.Parameter(torch.ones(WIDTH)))
        return net(lambda self: None, norm=norm, mlp=shared.MLP())

    assert reason(model, grid(1, 2)) == (
        "tensor.y = 2 splits the features that 'norm' (UnitLengthNorm) works on, and it is neither a LayerNorm or "
        "RMSNorm as weft knows them nor does it treat each feature alone; use y = 1"
    )
    assert TensorAxes().refuse(profile(model()), grid(2)) is None


def test_norms_without_a_weight_over_y() -> None:
    def refusal(norm: nn.Module, num_heads: int = 1) -> str | None:
        def forward(self: Any, tokens: Tensor) -> Tensor:
            hidden = self.embedding(tokens)
            return hidden + self.mlp(self.norm(hidden.unflatten(-1, (num_heads, -1))).flatten(-2))

        model = net(forward, embedding=nn.Embedding(32, WIDTH), norm=norm, mlp=shared.MLP())
        own = profile(model, lambda: (torch.ones(2, 4, dtype=torch.long),))
        assert TensorAxes().refuse(own, grid(2)) is None
        return TensorAxes().refuse(own, grid(1, 2))

    def double(self: Any, hidden: Tensor) -> Tensor:
        return 2 * hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + 1e-5)

    assert refusal(nn.RMSNorm(WIDTH, elementwise_affine=False)) is None
    assert "'norm' (DoubleRMSNorm) works on, and it is neither" in str(refusal(net(double, "DoubleRMSNorm")))
    assert refusal(nn.RMSNorm(WIDTH // 2, elementwise_affine=False), num_heads=2) == (
        f"tensor.y = 2 splits the {WIDTH} features between layers, and 'norm' (RMSNorm), which has no weight, norms "
        f"{WIDTH // 2}: weft cannot tell whether these are split; use y = 1"
    )


def test_labels_are_refused() -> None:
    def rank(index: int) -> str:
        plan = grid(2)
        model = parallelize(TRANSFORMERS["Llama"](), plan, Mesh(plan))
        tokens, labels = shared.token_batch(0)
        with pytest.raises(PlanError) as error:
            model(tokens, labels=labels)
        return str(error.value)

    for found in run_local(rank, 2):
        assert found.startswith("the model was given labels, but its logits are split over x")
        assert "weft.cross_entropy" in found


# --- the full product


def full_grids() -> list[tuple[int, int, int, int]]:
    """Every way to lay 2, 4 and 8 ranks out over x, y, shard and data."""
    sizes = (1, 2, 4, 8)
    return [(x, y, s, d) for x, y, s, d in itertools.product(sizes, sizes, sizes, sizes) if x * y * s * d in (2, 4, 8)]


def test_there_are_34_grids() -> None:
    assert len(full_grids()) == 4 + 10 + 20


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence", [False, True])
@pytest.mark.parametrize("name", SHIPPED | TRANSFORMERS)
@pytest.mark.parametrize("ranks", full_grids(), ids=str)
def test_full_product(
    ranks: tuple[int, int, int, int], name: str, sequence: bool, recompute: Recompute, monkeypatch: Patch
) -> None:
    shared.with_exact_norms(monkeypatch)
    keeps = sequence and recompute == "none"
    chunks = 2 if sequence and ranks[0] in (2, 4) else 1
    plan = grid(*ranks, sequence, keeps, chunks, memory=Memory(recompute), micro_batch=1)
    check(name, plan, clip=None if recompute == "full" else 0.5).require()


@pytest.mark.soak
@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("ranks", [g for g in full_grids() if g[1] == 1], ids=str)
def test_full_product_of_ones_own_models(ranks: tuple[int, int, int, int], name: str) -> None:
    if name == "vit" and ranks[0] == 8:
        with pytest.raises(PlanError, match=r"tensor\.x = 8 is more than the 5 outputs"):
            check(name, grid(*ranks)).require()
        return
    check(name, grid(*ranks)).require()


def test_all_models_are_in_the_product() -> None:
    assert set(ALL) == set(SHIPPED) | set(TRANSFORMERS) | set(OWN)


def test_cost_of_one_process_says_nothing() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.long)
    found = profile(made(decoder())(), lambda: (tokens,))
    assert cost(found, Plan(), split_batch(Plan(), 2, 8)).traffic == {}
