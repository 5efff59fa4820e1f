"""Recompute: the same gradients to the last bit, dropout included, from fewer bytes kept; counted on real runs."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import models_for_tests as models
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy

from weft.errors import PlanError
from weft.memory import recompute
from weft.parallel.apply import cost, parallelize
from weft.plan import Memory, Plan, Recompute, split_batch
from weft.profiling import profile
from weft.profiling.flops import ATTENTION

KINDS: tuple[Recompute, ...] = ("none", "selective", "full")


def make(model_fn: Callable[[], nn.Module], kind: Recompute) -> nn.Module:
    """The model on one process, under a memory policy."""
    torch.manual_seed(0)
    return parallelize(model_fn(), Plan(memory=Memory(kind)))


def live_bytes(model: nn.Module, tokens: Tensor) -> int:
    """Bytes of the tensors that are alive only because backward will need them."""

    def storages() -> dict[int, int]:
        gc.collect()
        found = [item for item in gc.get_objects() if type(item) in (Tensor, nn.Parameter)]
        return {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in found}

    made: list[weakref.ref[Tensor]] = []
    kept: dict[int, int] = {}
    before = storages()

    class Watching(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            for leaf in torch.utils._pytree.tree_leaves(result):
                if isinstance(leaf, Tensor):
                    made.append(weakref.ref(leaf))
            return result

    with Watching():
        loss = model(tokens).square().mean()
    for reference in made:
        tensor = reference()
        if tensor is not None:
            kept[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
    kept.pop(loss.untyped_storage()._cdata, None)
    return sum(size for storage, size in kept.items() if storage not in before)


@pytest.mark.parametrize("model_fn", [models.tied_decoder, models.dropout_gpt2, models.hf_llama, models.frozen_middle])
@pytest.mark.parametrize("kind", ["selective", "full"])
@pytest.mark.full(3)
def test_gradients_are_equal_to_the_last_bit(model_fn: Callable[[], nn.Module], kind: Recompute) -> None:
    tokens, results = models.token_batch(0)[0], []
    for current in ("none", kind):
        model = make(model_fn, current)  # type: ignore[arg-type]
        torch.manual_seed(3)
        output = model(tokens)
        loss = (output if isinstance(output, Tensor) else output.logits).square().mean()
        torch.rand(5)  # backward must repeat the masks of forward, whatever was drawn since
        loss.backward()
        results.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None} | {"loss": loss})
    assert list(results[0]) == list(results[1])
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_random_numbers_go_on_as_if_nothing_had_been_recomputed() -> None:
    drawn = []
    for kind in KINDS:
        model = make(models.dropout_gpt2, kind)
        torch.manual_seed(3)
        model(models.token_batch(0)[0]).square().mean().backward()
        drawn.append(torch.rand(1).item())
    assert len(set(drawn)) == 1


@pytest.mark.parametrize("model_fn", [models.tied_decoder, pytest.param(models.gpt2, marks=pytest.mark.soak)])
def test_bytes_kept_for_backward_fall(model_fn: Callable[[], nn.Module]) -> None:
    tokens = models.token_batch(0)[0]
    none, selective, full = (live_bytes(make(model_fn, kind), tokens) for kind in KINDS)
    assert none > selective > full > 0


def test_state_dict_and_evaluation_are_unchanged() -> None:
    tokens = models.token_batch(0)[0]
    plain = make(models.tied_decoder, "none")
    for kind in ("selective", "full"):
        model = make(models.tied_decoder, kind)  # type: ignore[arg-type]
        assert list(model.state_dict()) == list(plain.state_dict())
        with torch.no_grad():
            assert torch.equal(model(tokens), plain(tokens))


def test_full_computes_the_blocks_once_more() -> None:
    found = profile(models.tied_decoder(), lambda: (models.token_batch(0)[0],))
    plans = {kind: Plan(data=2, memory=Memory(kind)) for kind in KINDS}
    costs = {kind: cost(found, plan, split_batch(plan, 8, 7)) for kind, plan in plans.items()}
    assert costs["none"].flops == costs["selective"].flops == 3 * found.flops
    assert costs["full"].flops == 3 * found.flops + sum(block.flops for block in found.blocks)
    assert costs["none"].saved_bytes > costs["selective"].saved_bytes > costs["full"].saved_bytes
    assert costs["none"].transient_bytes == 0
    assert costs["full"].transient_bytes == max((block.saved_bytes or {})["none"] for block in found.blocks)


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(PlanError, match=r"memory\.recompute = 'full' works on blocks, and the model has none"):
        make(models.MLP, "full")


def test_attention_that_drops_weights_is_not_kept() -> None:
    """Kept, a GPU's kernel would draw nothing in recompute, and what is dropped behind it would be something else."""
    heads = [torch.empty(1, 2, 4, 8)] * 3
    for packet in ATTENTION:
        before = [None, True] if "attn_bias" in str(packet.default._schema) else []
        for dropout, expected in ((0.0, CheckpointPolicy.MUST_SAVE), (0.1, CheckpointPolicy.PREFER_RECOMPUTE)):
            assert recompute._policy(None, packet.default, *heads, *before, dropout) == expected, packet
            assert recompute._policy(None, packet.default, *heads, *before, dropout_p=dropout) == expected, packet
        assert recompute._policy(None, packet.default, *heads, *before) == CheckpointPolicy.MUST_SAVE, packet
    assert recompute._policy(None, torch.ops.aten.mm.default, *heads[:2]) == CheckpointPolicy.MUST_SAVE


def test_a_cache_of_keys_for_generation_is_left_out() -> None:
    """A model of transformers fills one in training, too: a block that is computed again would find its keys there."""
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2
    )
    tokens = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    found = {}
    for policy in ("none", "selective", "full"):
        torch.manual_seed(0)
        plan = Plan(memory=Memory(policy), precision="fp64")  # type: ignore[arg-type]
        model = parallelize(transformers.LlamaForCausalLM(config), plan)
        logits = model(tokens).logits
        logits.sum().backward()
        found[policy] = [logits, *(parameter.grad for parameter in model.parameters())]
    for policy in ("selective", "full"):
        assert all(map(torch.equal, found[policy], found["none"]))
