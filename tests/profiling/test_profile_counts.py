"""A profile's counts equal those of torch's own counters on a real step: parameters, FLOPs both ways, saved bytes."""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import models_for_tests as models
import pytest
import torch
from tensor_for_tests import decoder, made
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from weft.launch.local_ranks import run_local
from weft.models import DecoderConfig, build, token_loss
from weft.profiling import Convolution, Experts, Matmul, Profile, profile

pytestmark = pytest.mark.processes

BATCH, SEQUENCE, WIDTH = models.BATCH, models.SEQUENCE, models.WIDTH


def mixtral(implementation: str) -> Callable[[], nn.Module]:
    """A maker of transformers' MixtralForCausalLM, with its experts called in one of its ways."""

    def make() -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        sizes: dict[str, Any] = {"vocab_size": models.VOCABULARY, "hidden_size": 16, "intermediate_size": 24}
        sizes |= {"num_hidden_layers": 2}
        heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
        experts: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2, "use_cache": False}
        model = MixtralForCausalLM(MixtralConfig(**sizes, **heads, **experts))
        model.set_experts_implementation(implementation)
        return model

    return make


class Convolutions(nn.Module):
    """Strided, dilated, grouped and transposed ones; the first needs no gradient of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [
                nn.Conv2d(3, 8, 3, stride=2, padding=1),
                nn.Conv2d(8, 6, (3, 1), padding=(2, 0), dilation=(2, 1)),
                nn.ConvTranspose2d(6, 4, 2, stride=2),
            ]
        )

    def forward(self, images: Tensor) -> Tensor:
        for layer in self.layers:
            images = torch.tanh(layer(images))
        return images.flatten(1)


TOKEN_MODELS: dict[str, Callable[[], nn.Module]] = {
    "llama, tied": models.tied_decoder,
    "llama, biased": made(decoder(attention_bias=True, mlp_bias=True)),
    "mistral": made(decoder(architecture="mistral", sliding_window=3)),
    "qwen2": models.qwen_decoder,
    "qwen3": made(decoder(architecture="qwen3", num_key_value_heads=1)),
    "gpt2": models.gpt2,
    "first block frozen": models.frozen_first,
    "middle block frozen": models.frozen_middle,
    "root frozen": models.frozen_root,
}
TRANSFORMERS: dict[str, Callable[[], nn.Module]] = {
    "transformers' llama": models.hf_llama,
    "transformers' qwen2": models.hf_qwen2,
    "transformers' gpt2": models.hf_gpt2,
    "mixtral, batched": mixtral("batched_mm"),
    "mixtral, grouped": mixtral("grouped_mm"),
}
OTHER_MODELS: dict[str, Callable[[], nn.Module]] = {
    "sequential": models.sequential,
    "called twice": models.CalledTwice,
    "mlp": models.MLP,
    "shared module": models.SharedModule,
    "adapters": models.AdapterChain,
    "frozen heads": models.FrozenHeads,
    "convolutions": Convolutions,
}
ALL = TOKEN_MODELS | TRANSFORMERS | OTHER_MODELS


def example_of(name: str) -> Callable[[], tuple[Tensor]]:
    if name in OTHER_MODELS:
        inputs = torch.randn(2, 3, 9, 8) if name == "convolutions" else models.vector_batch(0)[0]
    else:
        inputs = models.token_batch(0)[0]
    return lambda: (inputs,)


def logits_of(output: Any) -> Tensor:
    logits: Tensor = output if isinstance(output, Tensor) else output.logits
    return logits


def made_once(name: str) -> nn.Module:
    torch.manual_seed(0)
    return ALL[name]()


# --- FLOPs


def forward_attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """torch's formula, which wants as many key heads as there are heads."""
    heads = query[1]
    return int(sdpa_flop_count(query, (key[0], heads, *key[2:]), (value[0], heads, *value[2:])))


def backward_attention(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    heads = query[1]
    keys, values = (key[0], heads, *key[2:]), (value[0], heads, *value[2:])
    return int(sdpa_backward_flop_count(gradient, query, keys, values))


# torch's counter has formulas for attention on a GPU only; the operations on a CPU are the same.
CPU_ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward_attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_attention,
}


def counted_flops(model: nn.Module, inputs: tuple[Tensor]) -> tuple[int, int]:
    """Forward and backward of a real step by torch's counter."""
    with FlopCounterMode(display=False, custom_mapping=CPU_ATTENTION) as counter:
        output = logits_of(model(*inputs))
        forward = counter.get_total_flops()
        output.sum().backward()
        return forward, counter.get_total_flops() - forward


@pytest.mark.parametrize("name", ALL)
def test_parameters_and_flops_are_those_of_torchs_counter(name: str) -> None:
    model = made_once(name)
    found = profile(model, example_of(name))
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())
    if name == "mixtral, grouped":  # for which torch has no formula: the same experts, each called by itself
        model.set_experts_implementation("eager")  # type: ignore[operator]
    assert (found.flops, found.backward_flops) == counted_flops(model, example_of(name)())
    assert found.backward_flops > 0


def test_flops_of_attention_are_those_of_its_matmuls_and_backward_computes_the_scores_once_more() -> None:
    # Written out as matmuls, attention has four products in backward; torch's formula has the fifth of fused kernels.
    model = made_once("llama, tied")
    found = profile(model, example_of("llama, tied"))
    with sdpa_kernel(SDPBackend.MATH):
        forward, backward = counted_flops(model, example_of("llama, tied")())
    again = sum(block.attention_flops for block in found.all) // 2
    assert (found.flops, found.backward_flops) == (forward, backward + again)


def test_a_grouped_convolution_counts_its_weight_gradient_once_where_torch_counts_it_for_each_group() -> None:
    model = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=4))
    inputs = (torch.randn(2, 8, 5, 5),)
    found = profile(model, lambda: inputs)
    first, grouped = found.blocks
    assert (first.flops, first.backward_flops) == (2 * 2 * 25 * 8 * 8 * 9, first.flops)  # no gradient of the input
    assert (grouped.flops, grouped.backward_flops) == (first.flops // 4, 2 * grouped.flops)
    assert counted_flops(model, inputs) == (found.flops, found.backward_flops + 3 * grouped.flops)


def test_what_has_no_gradient_counts_no_backward() -> None:
    model = made_once("mlp")
    assert profile(model.requires_grad_(False), example_of("mlp")).backward_flops == 0
    frozen = profile(models.frozen_first(), example_of("llama, tied"))
    assert [block.backward_flops > 0 for block in frozen.blocks] == [False, True, True]
    assert frozen.blocks[0].flops == frozen.blocks[1].flops


# --- saved bytes


def saved_in_a_real_run(model: nn.Module, name: str, is_masked: bool = False) -> int:
    """Bytes of the distinct storages that autograd keeps of forward and loss, parameters and buffers left out."""
    ignored = {p.untyped_storage()._cdata for p in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage()._cdata not in ignored:
            kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    mask = torch.ones(BATCH, SEQUENCE, dtype=torch.long)
    mask[0, 0] = 0
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(*example_of(name)(), **({"attention_mask": mask} if is_masked else {}))
        if name not in OTHER_MODELS:
            loss_of(output)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def loss_of(output: Any) -> Tensor:
    return token_loss(logits_of(output), models.token_batch(0)[1])[0]


def saved(found: Profile, policy: str = "none") -> int:
    return sum((block.saved_bytes or {})[policy] for block in found.all)


@pytest.mark.parametrize("name", TOKEN_MODELS | OTHER_MODELS)
def test_saved_bytes_are_those_of_a_real_run(name: str) -> None:
    model = made_once(name)
    finish = None if name in OTHER_MODELS else loss_of
    assert saved(profile(model, example_of(name), finish)) == saved_in_a_real_run(model, name) > 0


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_saved_bytes_of_transformers_are_those_of_a_batch_with_a_mask(name: str) -> None:
    # Where transformers sees that every position counts it makes no mask; on fake tensors it cannot see, and makes one.
    model = made_once(name)
    found = saved(profile(model, example_of(name), loss_of))
    assert found == saved_in_a_real_run(model, name, is_masked=True)
    mask_bytes = 2 * BATCH * SEQUENCE**2 * 4  # of two layers
    # Beside a mask, transformers also repeats the keys and values of two heads for four (one head it need not copy).
    repeated = 2 * 2 * BATCH * SEQUENCE * (16 - 8) * 4 if "mixtral" in name else 0
    assert found - saved_in_a_real_run(model, name) == mask_bytes + repeated


# --- shapes


def test_matmuls_by_shape() -> None:
    found = profile(models.tied_decoder(), example_of("llama, tied"))
    rows = BATCH * SEQUENCE
    assert found.blocks[0].matmuls == {
        Matmul(1, rows, 12, 12): 2,  # q and o
        Matmul(1, rows, 12, 6): 2,  # k and v, of one head
        Matmul(1, rows, 12, 19): 2,  # gate and up
        Matmul(1, rows, 19, 12): 1,
    }
    assert found.root.matmuls == {Matmul(1, rows, 12, models.VOCABULARY): 1}
    for block in found.all:
        flops = sum(2 * m.batch * m.rows * m.inner * m.columns * times for m, times in block.matmuls.items())
        assert flops + block.attention_flops == block.flops


def test_geometry_of_convolutions() -> None:
    found = profile(Convolutions(), example_of("convolutions"))
    expected = [
        Convolution(2, 3, 8, (9, 8), (5, 4), (3, 3), (2, 2), (1, 1), (1, 1), 1, False),
        Convolution(2, 8, 6, (5, 4), (5, 4), (3, 1), (1, 1), (2, 0), (2, 1), 1, False),
        Convolution(2, 6, 4, (5, 4), (10, 8), (2, 2), (2, 2), (0, 0), (1, 1), 1, True),
    ]
    assert [one for block in found.blocks for one in block.convolutions] == expected
    in_one_dim = profile(nn.Sequential(nn.Conv1d(2, 4, 3, padding=1, groups=2)), lambda: (torch.zeros(1, 2, 6),))
    assert in_one_dim.blocks[0].convolutions == (Convolution(1, 2, 4, (6,), (6,), (3,), (1,), (1,), (1,), 2, False),)


def test_boundary_and_moved_bytes() -> None:
    found = profile(models.tied_decoder(), example_of("llama, tied"))
    stream = BATCH * SEQUENCE * 12 * 4
    assert [block.boundary_bytes for block in found.blocks] == [stream] * 3
    assert found.root.boundary_bytes == BATCH * SEQUENCE * models.VOCABULARY * 4
    linear = profile(nn.Sequential(nn.Linear(4, 6, bias=False)), lambda: (torch.zeros(5, 4),)).blocks[0]
    assert (linear.read_bytes, linear.written_bytes) == (4 * (5 * 4 + 4 * 6), 4 * 5 * 6)
    # A look-up reads the rows that it gives, and the tokens; not the table.
    table = profile(nn.Sequential(nn.Embedding(1000, 3)), lambda: (torch.zeros(7, dtype=torch.long),)).blocks[0]
    assert (table.read_bytes, table.written_bytes) == (7 * 3 * 4 + 7 * 8, 7 * 3 * 4)


# --- experts


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm", "eager"])
def test_experts_of_mixtral(implementation: str) -> None:
    found = profile(mixtral(implementation)(), example_of("llama, tied"))
    numel = 16 * 48 + 24 * 16
    assert [block.experts for block in found.blocks] == [
        (Experts(f"model.layers.{layer}.mlp.experts", 4, 2, numel),) for layer in range(2)
    ]
    assert found.counted == (implementation != "eager")  # whose shapes depend on which tokens each expert takes


def test_a_grouped_matmul_has_the_rows_of_all_its_experts() -> None:
    found = profile(mixtral("grouped_mm")(), example_of("llama, tied"))
    taken = 2 * BATCH * SEQUENCE
    grouped = {matmul: times for matmul, times in found.blocks[0].matmuls.items() if matmul.groups > 1}
    assert grouped == {Matmul(1, taken, 16, 48, 4): 1, Matmul(1, taken, 24, 16, 4): 1}


class Routed(nn.Module):
    """Experts in a list, called one by one; `top_k` belongs to the router, if there is one."""

    def __init__(self, top_k: int | None, sizes: tuple[int, ...] = (4, 4, 4)) -> None:
        super().__init__()
        self.gate = nn.Linear(6, len(sizes))
        if top_k is not None:
            self.gate.top_k = top_k  # type: ignore[assignment]
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(6, size), nn.Linear(size, 6)) for size in sizes)

    def forward(self, hidden: Tensor) -> Tensor:
        weights = self.gate(hidden).softmax(-1)
        return torch.stack([expert(hidden) for expert in self.experts], -1).mul(weights[:, None]).sum(-1)


def test_experts_in_a_list() -> None:
    def found(block: nn.Module) -> tuple[Experts, ...]:
        return profile(nn.Sequential(block)).blocks[0].experts

    numel = 6 * 4 + 4 + 4 * 6 + 6
    assert found(Routed(2)) == (Experts("0.experts", 3, 2, numel),)
    assert found(Routed(None)) == (Experts("0.experts", 3, None, numel),)
    assert found(Routed(2, (4, 5))) == ()  # which are not alike
    assert found(models.AdapterChain()) == ()


# --- branches


def conv(inputs: int, outputs: int, kernel: int) -> nn.Module:
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2)


class Inception(nn.Module):
    """Four paths from one value, put side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.one = conv(4, 2, 1)
        self.three = nn.Sequential(conv(4, 2, 1), nn.ReLU(), conv(2, 2, 3))
        self.five = nn.Sequential(conv(4, 2, 1), nn.ReLU(), conv(2, 2, 5))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(4, 2, 1))
        self.last = conv(8, 4, 1)

    def forward(self, value: Tensor) -> Tensor:
        paths = [self.one(value), self.three(value), self.five(value), self.pool(value)]
        out: Tensor = value + self.last(torch.cat(paths, 1))
        return out


class Parallel(nn.Module):
    """Attention-like and MLP beside each other on one value, as GPT-J has them; `is_serial` has them one by one."""

    def __init__(self, is_serial: bool) -> None:
        super().__init__()
        self.is_serial = is_serial
        self.norm = nn.LayerNorm(6)
        self.query, self.value, self.out = (nn.Linear(6, 6) for _ in range(3))
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, hidden: Tensor) -> Tensor:
        normed = self.norm(hidden)
        mixed = hidden + self.out(self.query(normed).sigmoid() * self.value(normed))
        out: Tensor = mixed + self.down(torch.relu(self.up(self.norm(mixed) if self.is_serial else normed)))
        return out


class Towers(nn.Module):
    """Two chains of blocks that meet at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = (nn.ModuleList(nn.Linear(6, 6) for _ in range(2)) for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, value: Tensor) -> Tensor:
        left = right = value
        for a, b in zip(self.left, self.right, strict=True):
            left, right = a(left).tanh(), b(right).tanh()
        out: Tensor = self.head(left * right)
        return out


def test_branches_are_paths_that_need_nothing_of_each_other() -> None:
    images = profile(nn.Sequential(Inception(), Inception()), lambda: (torch.zeros(1, 4, 6, 6),))
    four = (("1.one",), ("1.three.0", "1.three.2"), ("1.five.0", "1.five.2"), ("1.pool.1",))
    assert images.blocks[1].branches == (four,)
    assert images.root.branches == ()  # the two blocks follow each other

    def branches(is_serial: bool) -> Any:
        return profile(nn.Sequential(Parallel(is_serial)), lambda: (torch.zeros(5, 6),)).blocks[0].branches

    assert branches(False) == ((("0.query", "0.value", "0.out"), ("0.up", "0.down")),)
    assert branches(True) == ((("0.query",), ("0.value",)),)
    towers = profile(Towers(), lambda: (torch.zeros(5, 6),))
    assert towers.root.branches == ((("left.0", "left.1"), ("right.0", "right.1")),)


def test_branches_of_a_decoder() -> None:
    block = profile(models.tied_decoder(), example_of("llama, tied")).blocks[1]
    name = "model.layers.1"
    assert block.branches == (
        ((f"{name}.self_attn.q_proj",), (f"{name}.self_attn.k_proj",), (f"{name}.self_attn.v_proj",)),
        ((f"{name}.mlp.gate_proj",), (f"{name}.mlp.up_proj",)),
    )
    assert profile(models.gpt2(), example_of("gpt2")).blocks[0].branches == ()


# --- size


def test_a_405b_decoder_takes_no_memory() -> None:
    config = DecoderConfig(
        vocab_size=128256,
        hidden_size=16384,
        intermediate_size=53248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
    )
    numel = 405_853_388_800
    matmuls = numel - 128256 * 16384 - (2 * 126 + 1) * 16384  # the embedding is a lookup, norms are no matmuls
    attention = 126 * 2 * 2 * 128 * 8192 * 8192 * 128

    def peak_kib() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def child(_: int) -> int:
        """What it takes at most beyond what it began with."""
        before = peak_kib()
        with torch.device("meta"):
            model = build(config)
        found = profile(model, lambda: (torch.empty(1, 8192, dtype=torch.long),))
        assert found.numel == numel
        assert found.flops == 2 * 8192 * matmuls + attention
        assert found.backward_flops == 4 * 8192 * matmuls + 5 * attention // 2
        return peak_kib() - before

    small = DecoderConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    profile(build(small), lambda: (torch.zeros(1, 8, dtype=torch.long),))  # what is imported late
    assert run_local(child, 1, timeout_seconds=300)[0] < 300 * 1024
