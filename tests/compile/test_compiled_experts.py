"""Blocks with experts are compiled as dense ones are, also under recompute: whole, and once for all layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

from weft.architectures import Capacity, DecoderConfig
from weft.compile.blocks import compile_blocks
from weft.mesh import Mesh
from weft.models import build, initialise
from weft.models.loss import IGNORE
from weft.parallel.apply import parallelize
from weft.plan import Memory, Plan
from weft.run_tables import LayerDrop
from weft.step.layer_drop import drop_layers
from weft.step.train_step import train_step

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
DENSE = DecoderConfig(architecture="qwen3", **SIZES)


def experts(architecture: str = "qwen3_moe", **others: Any) -> DecoderConfig:
    """Four experts, of which a token goes through two, and both losses of routers."""
    losses = {"router_aux_loss_coef": 0.5, "router_z_loss_coef": 0.1}
    own = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
    return DecoderConfig(architecture=architecture, **{**SIZES, **own, **losses, **others})  # type: ignore[arg-type]


LOSSES = experts()
RANDOM = experts(capacity=Capacity(1.0, 1, "random"))
CONFIGS = {
    "qwen3_moe": LOSSES,
    "mixtral": experts("mixtral"),
    "qwen2_moe, a shared expert": experts("qwen2_moe", shared_expert_intermediate_size=8),
    "deepseek_v3, biases and shared experts": experts(
        "deepseek_v3", q_lora_rank=None, kv_lora_rank=8, qk_nope_head_dim=4, qk_rope_head_dim=4, v_head_dim=4,
        router_bias_update_rate=0.05, n_group=1, topk_group=1, n_shared_experts=1, first_k_dense_replace=0,
    ),
    "a capacity, random": RANDOM,
    "a capacity, first": experts(capacity=Capacity(0.75, 1)),
    "residual experts": experts(residual_experts=True),
}  # fmt: skip


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    """Nothing is compiled yet, and what compile_blocks sets in torch ends with the test."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with torch._dynamo.config.patch():
        yield


def padded(step: int) -> tuple[Tensor, Tensor]:
    """Four sequences of 16, of which the last tokens of some have no label: they are padding."""
    drawn = torch.randint(1, 61, (4, 17), generator=torch.Generator().manual_seed(step))
    inputs, labels = drawn[:, :-1].clone(), drawn[:, 1:].clone()
    for row, length in enumerate((3, 16, 7, 5)):
        labels[row, length:] = IGNORE
    return inputs, labels


def trained(
    config: DecoderConfig,
    policy: str,
    compiled: Callable[[nn.Module], None] | None = None,
    num_steps: int = 2,
    layer_drop: LayerDrop | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of gradients of some steps of SGD, and the parameters after them."""
    plan = Plan(memory=Memory(policy), exact=layer_drop is None)  # type: ignore[arg-type]
    mesh, model = Mesh(plan), build(config)
    initialise(model, 0)
    model = parallelize(model, plan, mesh)
    if compiled is not None:
        compiled(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    gates = None if layer_drop is None else drop_layers(model, layer_drop, 0, plan, optimizer)
    for step in range(num_steps):
        if gates is not None:
            gates.begin(50 + step, 0)
        result = train_step(model, optimizer, [padded(step)], mesh)
        found += [float(result.loss), float(result.grad_norm)]
    return found, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def in_graphs(model: nn.Module) -> None:
    compile_blocks(model, pytest.fail, "aot_eager")


def num_graphs() -> int:
    return int(torch._dynamo.utils.counters["stats"]["unique_graphs"])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("policy", ["full", pytest.param("selective", marks=pytest.mark.soak)])
def test_blocks_with_experts_are_compiled_whole_under_recompute(name: str, policy: str) -> None:
    expected, expected_parameters = trained(CONFIGS[name], policy)
    found, parameters = trained(CONFIGS[name], policy, in_graphs)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert num_graphs() == 2  # one of all blocks and one of the loss, as of a dense model
    assert found == pytest.approx(expected, rel=1e-5)
    for key, parameter in parameters.items():
        assert (parameter - expected_parameters[key]).abs().max() < 1e-5, key


def test_dense_blocks_have_as_many_graphs() -> None:
    trained(DENSE, "full", in_graphs)
    assert num_graphs() == 2


def test_selective_recompute_of_experts_is_compiled_and_masks_of_padding_compile_nothing_anew() -> None:
    trained(RANDOM, "selective", in_graphs, num_steps=4)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert num_graphs() == 2


def test_experts_that_are_skipped_are_compiled() -> None:
    drop = LayerDrop(theta=0.3, gamma=1.0)
    expected, _ = trained(LOSSES, "full", None, 4, drop)
    found, _ = trained(LOSSES, "full", in_graphs, 4, drop)
    assert found == pytest.approx(expected, rel=1e-5)
    assert not torch._dynamo.utils.counters["graph_break"]
    assert num_graphs() == 2


def saved_shapes(config: DecoderConfig) -> list[tuple[int, ...]]:
    """The shapes of what the compiled blocks of a model save under full recompute."""
    plan = Plan(memory=Memory("full"))
    model: Any = build(config)
    initialise(model, 0)
    model = parallelize(model, plan, Mesh(plan))
    in_graphs(model)
    inputs, _ = padded(0)
    model.model(inputs)  # compiles
    shapes: dict[int, tuple[int, ...]] = {}

    def keep(saved: Tensor) -> Tensor:
        shapes[saved.untyped_storage().data_ptr()] = tuple(saved.shape)
        return saved

    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        hidden = model.model(inputs)
    assert hidden.requires_grad
    return sorted(shape for storage, shape in shapes.items() if storage not in own)


def test_full_recompute_saves_of_experts_what_it_saves_of_dense_blocks() -> None:
    assert saved_shapes(LOSSES) == saved_shapes(DENSE)


def test_what_stays_uncompiled_is_said_once() -> None:
    said: list[str] = []
    plan = Plan(memory=Memory("full"), precision="fp64")  # experts in fp64 read on the host where theirs end
    model = build(LOSSES).double()
    initialise(model, 0)
    model = parallelize(model, plan, Mesh(plan))
    compile_blocks(model, said.append, "eager")
    for step in range(2):
        model(padded(step)[0])
    assert len(said) == 1
    assert "torch.compile leaves a part of the model uncompiled" in said[0]
    assert "slower" in said[0]
