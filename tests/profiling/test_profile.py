"""Profiles: blocks are found, nothing is counted twice, and the model is left as it was."""

from __future__ import annotations

from collections.abc import Callable

import models_for_tests as models
import pytest
import torch
from torch import Tensor, nn

from weft.inspection.blocks import find_blocks
from weft.profiling import Profile, find_parameters, profile


def tokens() -> tuple[Tensor]:
    return (models.token_batch(0)[0],)


def vectors() -> tuple[Tensor]:
    return (models.vector_batch(0)[0],)


EXAMPLES: list[tuple[Callable[[], nn.Module], list[str]]] = [
    (models.tied_decoder, ["model.layers.0", "model.layers.1", "model.layers.2"]),
    (models.gpt2, ["transformer.h.0", "transformer.h.1"]),
    (models.hf_llama, ["model.layers.0", "model.layers.1"]),
    (models.hf_gpt2, ["transformer.h.0", "transformer.h.1"]),
    (models.sequential, ["0", "2", "3", "4"]),  # 1 is a ReLU, without parameters
    (models.FrozenHeads, ["layers.0", "layers.1", "layers.2"]),  # the Sequentials inside are not chains of their own
    (models.MLP, []),
    (models.Named, []),
    (lambda: nn.Linear(3, 3), []),
]


@pytest.mark.parametrize(("model_fn", "expected"), EXAMPLES)
def test_blocks_are_the_elements_of_the_outermost_chains(
    model_fn: Callable[[], nn.Module], expected: list[str]
) -> None:
    model = model_fn()
    assert list(find_blocks(model)) == expected
    assert all(module is model.get_submodule(name) for name, module in find_blocks(model).items())


def test_chains_in_chains_and_dicts_are_opened_and_a_module_counts_once() -> None:
    shared = nn.Linear(2, 2)
    model = nn.ModuleList(
        [nn.ModuleList([nn.Linear(2, 2), shared]), nn.ModuleDict({"a": nn.Sequential(nn.Linear(2, 2), shared)}), shared]
    )
    assert list(find_blocks(model)) == ["0.0", "0.1", "1.a.0"]


@pytest.mark.parametrize("model_fn", [example[0] for example in EXAMPLES] + [models.SharedModule, models.AdapterChain])
def test_every_parameter_belongs_to_one_block_and_counts_once(model_fn: Callable[[], nn.Module]) -> None:
    model = model_fn()
    found = profile(model)
    assert found.numel == sum(parameter.numel() for parameter in model.parameters())
    assert found.num_trained == sum(p.numel() for p in model.parameters() if p.requires_grad)
    names = [parameter.name for block in found.all for parameter in block.parameters]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert found.root.name == ""


def test_what_several_blocks_use_belongs_to_the_root_and_knows_all_its_places() -> None:
    by_parameter, by_module = models.SharedParameter(), models.SharedModule()
    places = find_parameters(by_parameter)[""]["layers.0.own.weight"]
    assert places == [(by_parameter.layers[0].own, "weight"), (by_parameter.layers[1].own, "weight")]
    assert find_parameters(by_module)[""]["layers.0.shared.weight"] == [(by_module.layers[0].shared, "weight")]
    assert set(find_parameters(by_module)["layers.1"]) == {"layers.1.own.weight", "layers.1.own.bias"}
    tied = models.tied_decoder()
    assert "lm_head.weight" not in find_parameters(tied)[""]
    assert len(find_parameters(tied)[""]["model.embed_tokens.weight"]) == 2


def test_a_block_inside_another_keeps_its_own_parameters() -> None:
    inner = nn.Linear(4, 4)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.own = inner, nn.Linear(4, 4)

    model = nn.Module()
    model.layers = nn.ModuleList([inner, Outer()])
    assert {name: sorted(found) for name, found in find_parameters(model).items()} == {
        "": [],
        "layers.0": ["layers.0.bias", "layers.0.weight"],
        "layers.1": ["layers.1.own.bias", "layers.1.own.weight"],
    }


def test_flops_of_attention_are_counted_in_full() -> None:
    model = models.tied_decoder()
    found = profile(model, tokens)
    batch, sequence = tokens()[0].shape
    positions, matmuls = batch * sequence, sum(p.numel() for p in model.parameters() if p.dim() == 2)
    attention = (
        3 * 2 * 2 * batch * 2 * sequence * sequence * 6
    )  # layers · (QK and PV) · 2 · batch · heads · s² · head_dim
    assert found.flops == 2 * positions * matmuls + attention  # the embedding is a lookup; the tied head is a matmul
    assert sum(block.attention_flops for block in found.all) == attention
    assert len({block.flops for block in found.blocks}) == 1


def saved(found: Profile, kind: str) -> int:
    return sum((block.saved_bytes or {})[kind] for block in found.all)


def test_recompute_saves_less_and_full_saves_least() -> None:
    found = profile(models.tied_decoder(), tokens)
    assert saved(found, "none") > saved(found, "selective") > saved(found, "full") > 0
    block = found.blocks[1].saved_bytes or {}
    # A block's input [8, 7, 12] in float32. The rotary tables [7, 6] were counted where they were first used.
    assert block["full"] == 8 * 7 * 12 * 4


def test_calls_and_need_of_backward() -> None:
    twice = profile(models.CalledTwice(), vectors)
    assert [block.calls for block in twice.blocks] == [2, 1]
    frozen = profile(models.frozen_first(), tokens)
    assert [block.in_backward for block in frozen.blocks] == [False, True, True]
    middle = profile(models.frozen_middle(), tokens)
    assert [block.in_backward for block in middle.blocks] == [True, True, True]


class Peeking(nn.Module):
    """Looks at the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(models.WIDTH, 5)])

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers[0](inputs)
        return out if inputs.sum() > 0 else -out


class Selecting(Peeking):
    """Has a shape that depends on the values of its input."""

    def forward(self, inputs: Tensor) -> Tensor:
        out: Tensor = self.layers[0](inputs[inputs[:, 0] > 0])
        return out


@pytest.mark.parametrize("model_fn", [Peeking, Selecting])
def test_a_forward_that_depends_on_values_leaves_the_structure_known(model_fn: Callable[[], nn.Module]) -> None:
    found = profile(model_fn(), vectors)
    assert found == profile(model_fn())
    assert not found.counted


def test_an_error_of_the_model_itself_is_not_hidden() -> None:
    with pytest.raises(RuntimeError, match=r"reduction dim|shape"):
        profile(models.MLP(), lambda: (torch.zeros(2, models.WIDTH + 1),))


def test_profiling_leaves_the_model_as_it_was() -> None:
    model = models.dropout_gpt2()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    profile(model, tokens)
    assert torch.equal(torch.rand(1), expected)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
