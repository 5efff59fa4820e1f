"""Axis context: sequences over ranks against the unsplit model, its bytes by hand, long sequences, and refusals."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import tensor_for_tests as shared
import torch
from nets_for_tests import net, repeated
from sampled_for_tests import one_in
from tensor_for_tests import SHIPPED, check, decoder, failures, made
from torch import Tensor, nn

import weft.comm
import weft.parallel.context.axis
import weft.step.train_step
from weft.comm import Axis, Pending
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import GPT2Config
from weft.parallel.apply import cost, parallelize, refuse
from weft.parallel.context.attention import zigzag
from weft.parallel.context.axis import own_tokens
from weft.plan import Context, Memory, Plan, Recompute, Shard, split_batch
from weft.plan import Tensor as TensorPlan
from weft.profiling import profile
from weft.proof.prove import verify
from weft.sharding.flat_buffer import Flat
from weft.sharding.units import units_of
from weft.step.train_step import train_step

pytestmark = pytest.mark.processes

Patch = pytest.MonkeyPatch


def over(degree: int, kind: Any = "ring", x: int = 1, y: int = 1, sequence: bool = False, **others: Any) -> Plan:
    """A plan over context, and x and y beside it."""
    return Plan(context=Context(degree, kind), tensor=TensorPlan(x, y, sequence), **others)


# --- the oracle

CASES: dict[str, tuple[str, Plan]] = {
    "ring 2": ("tied", over(2)),
    "all-to-all 2": ("biased", over(2, "all-to-all", micro_batch=2)),
    "ring 4": ("gpt2", over(4)),
    "all-to-all 4": ("one key head", over(4, "all-to-all")),
    "ring 2, full": ("two key heads", over(2, memory=Memory("full"))),
    "all-to-all 2, selective": ("gpt2", over(2, "all-to-all", memory=Memory("selective"))),
    "ring 4, window": ("window", over(4, micro_batch=4)),
    "all-to-all 2, window": ("window", over(2, "all-to-all")),
    "ring 2, window, selective": ("window", over(2, memory=Memory("selective"))),
    "ring 2 × x 2": ("one key head", over(2, x=2)),
    "ring 2 × x 2, sequence": ("tied", over(2, x=2, sequence=True, memory=Memory("selective"))),
    "all-to-all 2 × x 2, sequence": ("two key heads", over(2, "all-to-all", x=2, sequence=True)),
    "ring 2 × y 2": ("biased", over(2, y=2)),
    "ring 2 × shard 2": ("gpt2", over(2, shard=Shard(2, 3), micro_batch=1)),
    "all-to-all 4 × x 2": ("tied", over(4, "all-to-all", x=2)),
    "ring 2 × data 2 × shard 2": ("tied", over(2, data=2, shard=Shard(2, 2), memory=Memory("full"))),
    "ring 2 × x 2 × y 2, sequence": ("one key head", over(2, x=2, y=2, sequence=True)),
}


@pytest.mark.parametrize(("name", "plan"), one_in(2, CASES))
@pytest.mark.sampled(3)
def test_shipped_models(name: str, plan: Plan) -> None:
    check(name, plan).require()


@pytest.mark.parametrize("frozen", [("model.embed", "model.layers.0."), ("model.embed", "model.layers.0.self_attn")])
@pytest.mark.parametrize("plan", [over(2), over(2, "all-to-all", x=2, memory=Memory("full"))], ids=Plan.describe_axes)
def test_frozen_parts_say_nothing_backward(frozen: tuple[str, ...], plan: Plan) -> None:
    check("", plan, make=made(decoder(num_key_value_heads=4), *frozen)).require()


def windowed_mistral() -> nn.Module:
    """transformers' model, inside of another one, with a config that other models use, too, and dynamic caches."""
    import transformers

    sizes: dict[str, Any] = {"vocab_size": 61, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 5}
    return logits_of(transformers.MistralForCausalLM(transformers.MistralConfig(**sizes, **heads)))


@pytest.mark.parametrize("plan", [over(2), over(2, "all-to-all", memory=Memory("full"))], ids=Plan.describe_axes)
@pytest.mark.sampled(1)
def test_an_attention_that_is_called_twice(plan: Plan) -> None:
    check("", plan, make=lambda: repeated(SHIPPED["tied"]())).require()


def test_attention_without_gradients_is_not_recomputed() -> None:
    def forward(self: Any, tokens: Tensor, **others: Tensor) -> Tensor:
        with torch.no_grad():
            draft = self.model(tokens, **others)
        return self.model(tokens, **others) + draft

    check("", over(2, memory=Memory("full")), make=lambda: net(forward, model=SHIPPED["tied"]())).require()


def logits_of(model: nn.Module) -> nn.Module:
    """Returns only the logits of a model."""
    return net(lambda self, tokens: self.model(tokens).logits, model=model)


@pytest.mark.parametrize("plan", [over(2), over(2, "all-to-all")], ids=Plan.describe_axes)
def test_the_attention_interface_of_transformers(plan: Plan) -> None:
    check("", plan, make=windowed_mistral).require()


# --- negative controls


def broken(name: str, plan: Plan) -> set[str]:
    """What the report found wrong; something must be."""
    found = failures(check(name, plan, steps=1))
    assert found
    return found


def test_finds_gradients_that_are_not_summed(monkeypatch: Patch) -> None:
    apply = weft.parallel.context.axis.ContextAxis.apply

    def forgetful(self: Any, model: nn.Module, plan: Plan, mesh: Mesh, values: Any) -> nn.Module:
        before = {id(flat): list(flat.sum_over) for flat in units_of(model).flats}  # type: ignore[union-attr]
        model = apply(self, model, plan, mesh, values)
        for flat in units_of(model).flats:  # type: ignore[union-attr]
            flat.sum_over = before[id(flat)]
        return model

    monkeypatch.setattr(weft.parallel.context.axis.ContextAxis, "apply", forgetful)
    assert "worst gradient" in broken("tied", over(2))


def test_finds_positions_that_are_not_dealt(monkeypatch: Patch) -> None:
    monkeypatch.setattr(weft.parallel.context.axis, "_add_positions", lambda *given: given[-2:])
    for name in ("tied", "gpt2"):
        found = broken(name, over(2))
        assert "loss" in found
        assert not any(what.startswith("traffic") for what in found)


def test_finds_labels_that_are_not_dealt(monkeypatch: Patch) -> None:
    def forgetful(batch: tuple[Tensor, ...], axis: Axis) -> tuple[Tensor, ...]:
        tokens, labels = batch
        half = labels.shape[1] // axis.degree
        return own_tokens((tokens,), axis)[0], labels[:, axis.index * half : (axis.index + 1) * half]

    monkeypatch.setattr(weft.step.train_step, "own_tokens", forgetful)
    assert "loss" in broken("tied", over(2))


def test_finds_keys_that_do_not_travel(monkeypatch: Patch) -> None:
    from weft.parallel.context import attention as context_attention

    def still(received: Any, sent: Any, axis: Axis, by: int = 1) -> Pending:
        pending = weft.comm.shift(received, sent, axis, by)
        pending.wait()
        for target, source in zip(received, sent, strict=True):
            target.copy_(source)
        return pending

    monkeypatch.setattr(context_attention, "shift", still)
    found = broken("tied", over(2))
    assert "loss" in found
    assert not any(what.startswith("traffic") for what in found)


def test_finds_a_loss_that_is_not_summed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        weft.step.train_step, "all_reduce", lambda tensor, axis: shared.counted(axis, "all_reduce", tensor)
    )
    assert "loss" in broken("tied", over(2))


def test_finds_gradients_that_are_averaged(monkeypatch: Patch) -> None:
    finish = Flat.finish_reduce

    def mean(self: Flat) -> None:
        finish(self)
        self.slice_gradient.div_(2)

    monkeypatch.setattr(Flat, "finish_reduce", mean)
    assert "worst gradient" in broken("tied", over(2))


# --- who has what, and bytes by hand


@pytest.mark.parametrize("degree", [2, 4])
def test_tokens_are_dealt_from_both_ends(degree: int) -> None:
    sequence = 4 * degree
    whole = torch.arange(sequence)[None].repeat(3, 1)
    parts = [own_tokens((whole, whole), Axis("context", degree, i, None, Any))[0][0] for i in range(degree)]  # type: ignore[arg-type]
    assert parts[0].tolist() == [0, 1, sequence - 2, sequence - 1]
    assert sorted(itertools.chain(*(part.tolist() for part in parts))) == list(range(sequence))
    assert all(torch.equal(part, zigzag(sequence, degree, i)) for i, part in enumerate(parts))
    # Causal attention is the same work for all: what a rank's tokens may see adds up alike.
    assert len({int((part + 1).sum()) for part in parts}) == 1


def test_traffic_by_hand() -> None:
    batch, sequence, heads, keys, head_dim, degree = 2, 16, 8, 2, 2, 4
    tokens = torch.zeros(batch, sequence, dtype=torch.long)
    config = decoder(num_key_value_heads=keys, num_hidden_layers=1)
    found = profile(made(config)(), lambda: (tokens,))
    local = batch * sequence // degree * head_dim * 4  # of one head
    plan = over(degree)
    told = cost(found, plan, split_batch(plan, batch, sequence)).traffic["context", "send"]
    # 2(p-1) messages of K or V forward; again backward, and as many of their gradients.
    assert (told.calls, told.num_bytes) == (6 + 12, (6 + 12) * keys * local)
    plan = over(degree, "all-to-all")
    told = cost(found, plan, split_batch(plan, batch, sequence)).traffic["context", "all_to_all"]
    # There: q and the key heads, of which each of four ranks needs one (2 heads, twice); back: the result. Twice.
    assert (told.calls, told.num_bytes) == (4, 2 * (heads + 2 * 2 * keys) * local + 2 * heads * local)
    gradients = cost(found, plan, split_batch(plan, batch, sequence)).traffic["context", "all_reduce"]
    assert gradients.num_bytes == pytest.approx(found.numel * 4, rel=0.01)  # every trained element once, and padding


def test_flops_and_saved_bytes_go_over_context() -> None:
    tokens = torch.zeros(2, 16, dtype=torch.long)
    found = profile(made(decoder())(), lambda: (tokens,))
    whole, parts = (cost(found, plan, split_batch(plan, 2, 16)) for plan in (Plan(), over(4)))
    assert parts.flops == pytest.approx(whole.flops / 4, rel=1e-3)
    assert parts.saved_bytes == pytest.approx(whole.saved_bytes / 4, rel=1e-3)


# --- memory and long sequences

TINY = decoder(hidden_size=8, intermediate_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=32)


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize("degree", [2, 4])
def test_each_rank_saves_its_part(degree: int, kind: Any) -> None:
    config = decoder(vocab_size=128, hidden_size=32, intermediate_size=80)
    alone = shared.predicted_saved_bytes(config, Plan(), 2, 64)
    for measured in shared.measured_saved_bytes(config, over(degree, kind), 2, 64):
        assert measured == pytest.approx(alone / degree, rel=0.15)
        assert shared.predicted_saved_bytes(config, over(degree, kind), 2, 64) == pytest.approx(measured, rel=0.15)


def train_long(sequence: int, degree: int) -> list[dict[str, float]]:
    """One step on a long sequence: the loss, and what autograd saved."""

    def rank(index: int) -> dict[str, float]:
        plan = over(degree)
        mesh = Mesh(plan)
        model = parallelize(made(TINY)(), plan, mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.arange(sequence)[None] * 7 % 32
        saved: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            result = train_step(model, optimizer, [(tokens, tokens)], mesh)
        return {"loss": result.loss.item(), "saved": sum(saved.values())}

    return run_local(rank, degree, 600)


def test_8192_tokens_over_four_ranks() -> None:
    alone, parts = train_long(8192, 1), train_long(8192, 4)
    predicted = shared.predicted_saved_bytes(TINY, Plan(), 1, 8192)
    assert len({part["loss"] for part in parts}) == 1
    assert parts[0]["loss"] == pytest.approx(alone[0]["loss"], rel=1e-5)
    for part in parts:
        assert part["saved"] == pytest.approx(predicted / 4, rel=0.15)


@pytest.mark.soak
def test_131072_tokens_over_four_ranks() -> None:
    predicted = shared.predicted_saved_bytes(TINY, Plan(), 1, 131_072)
    for part in train_long(131_072, 4):
        assert part["saved"] == pytest.approx(predicted / 4, rel=0.15)
        assert 0 < part["loss"] < 10


# --- bad input


def reason(make: Callable[[], nn.Module], plan: Plan, sequence: int = 16) -> str:
    """Why a plan is refused."""
    found = profile(make(), lambda: (torch.zeros(1, sequence, dtype=torch.long),))
    with pytest.raises(PlanError) as error:
        refuse(found, plan)
    return str(error.value)


def test_a_sequence_that_context_does_not_divide() -> None:
    with pytest.raises(PlanError, match=r"a sequence of 12 tokens does not divide into 2 × context = 8 equal parts"):
        split_batch(over(4), 1, 12)
    with pytest.raises(PlanError, match="use a multiple of 16"):
        verify(SHIPPED["tied"], shared.token_batch, over(8))


def test_too_few_heads_for_all_to_all() -> None:
    make = made(decoder(num_attention_heads=4, num_key_value_heads=4))
    assert reason(make, over(8, "all-to-all")) == (
        "context = 8 with kind = 'all-to-all' does not divide the 4 heads that 'model.layers.0.self_attn.core' has on "
        "each rank; use kind = 'ring' or a divisor"
    )
    assert "the 2 heads" in reason(make, over(4, "all-to-all", x=2))


def test_attention_that_weft_cannot_split_along_the_sequence() -> None:
    assert reason(lambda: nn.Sequential(nn.Embedding(4, 4), nn.Linear(4, 4)), over(2)) == (
        "context = 2, but no attention of Sequential is one that weft can split along the sequence (weft.models' "
        "CausalAttention, or transformers' attention interface); use context = 1"
    )


def test_attention_that_drops() -> None:
    make = made(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=1, n_head=4, attn_pdrop=0.1))
    assert reason(make, over(2)) == (
        "context = 2, but 'transformer.h.0.attn.core' drops attention weights; set its dropout (attn_pdrop) to 0"
    )


def test_a_model_that_takes_no_positions() -> None:
    def wrapped() -> nn.Module:
        return net(lambda self, tokens: self.model(tokens), "Wrapped", model=SHIPPED["tied"]())

    assert reason(wrapped, over(2)).startswith(
        "context = 2 tells each rank the positions of its tokens in the sequence, and the forward of Wrapped has no "
        "argument 'positions'; add it"
    )
    takes_positions = net(lambda self, tokens, **others: self.model(tokens, **others), model=SHIPPED["tied"]())
    refuse(profile(takes_positions), over(2))


def test_the_bytes_of_a_model_that_cannot_be_counted_are_refused() -> None:
    plan = over(2)
    with pytest.raises(PlanError, match="context = 2 follows from the attentions that a forward calls"):
        cost(profile(SHIPPED["tied"]()), plan, split_batch(plan, 8, 16))


def test_a_model_that_is_not_given_tokens() -> None:
    def rank(index: int) -> str:
        plan = over(2)
        model = parallelize(SHIPPED["tied"](), plan, Mesh(plan))
        with pytest.raises(PlanError) as error:
            model(torch.zeros(2, 4, 16))
        return str(error.value)

    words = (
        "Decoder got no tokens [batch, sequence] as its first argument to split over context = 2; pass them, or use "
        "context = 1"
    )
    assert run_local(rank, 2) == [words] * 2


# --- the full product


@pytest.mark.soak
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("name", SHIPPED)
@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize(
    ("degree", "x", "y", "shard", "data", "sequence"),
    [
        (2, 1, 1, 1, 1, False),
        (4, 1, 1, 1, 1, False),
        (2, 2, 1, 1, 1, False),
        (2, 2, 1, 1, 1, True),
        (2, 1, 2, 1, 1, False),
        (2, 1, 1, 2, 1, False),
        (4, 2, 1, 1, 1, True),
        (2, 2, 2, 1, 1, True),
        (2, 2, 1, 2, 1, True),
        (2, 1, 1, 2, 2, False),
    ],
)
def test_full_product(
    degree: int,
    x: int,
    y: int,
    shard: int,
    data: int,
    sequence: bool,
    kind: Any,
    name: str,
    recompute: Recompute,
) -> None:
    plan = over(degree, kind, x, y, sequence, data=data, shard=Shard(shard, 3), memory=Memory(recompute), micro_batch=1)
    check(name, plan).require()
