"""What LSTM and GRU models do not have is refused in words, by `weft plan` and `weft train` alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weft.cluster.hardware import load
from weft.compile.blocks import wants_compile
from weft.errors import ConfigError, WeftError
from weft.models import DecoderConfig, RecurrentConfig, build, initial_value
from weft.plan import Plan
from weft.plan import Tensor as TensorPlan
from weft.planner.model import planned_model
from weft.planner.predict import refuse_run
from weft.planner.question import Question
from weft.run_file import load_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "lstm.toml"
REFUSALS = {
    "plan.tensor.y=2": "tensor.y = 2 splits the features between layers, but not all layers can be",
    "plan.tensor={x=2, sequence=true}": "tensor.sequence = true gives what x does not split a part of each sequence",
    "plan.context=2": "context = 2, but no attention of RecurrentModel",
    "plan.expert=2": "expert = 2, but RecurrentModel has no layer of experts",
    "plan.branch=2": "branch = 2, but RecurrentModel has no independent branches",
    "plan.tile.rows=2": "tile splits images",
    "plan.memory.recompute=selective": "block 'layers.0' is recurrent",
    "plan.pipe=3": "3 stages need as many blocks",
    "data.documents=separate": "data.documents = 'separate' keeps attention inside of documents",
    "train.layer_drop={}": "train.layer_drop skips blocks that add to a residual stream",
    "lora={}": "[lora] updates linears of blocks, and the blocks of this model have none",
    "plan.matmul=fp8": "fp8",
    "model.num_attention_heads=4": "unknown key 'model.num_attention_heads'",
    "model.hidden_size=0": "hidden_size = 0 must be positive",
    "model.architecture=ltsm": "did you mean 'lstm'",
}


@pytest.mark.parametrize("change", REFUSALS)
def test_what_a_recurrent_model_does_not_have_is_refused_in_words(change: str) -> None:
    given = [
        change,
        "plan.exact=false",
        "plan.data=1",
        "data.sequence=16",
        "train.batch=8",
        "plan.micro_batch=2",
        "model.num_hidden_layers=2",
    ]
    with pytest.raises(WeftError) as refused:
        refuse_run(load_run(EXAMPLE, given))
    assert REFUSALS[change] in str(refused.value)


def test_the_example_itself_is_not_refused() -> None:
    for kind in ("lstm", "gru"):
        refuse_run(load_run(EXAMPLE, ["data.sequence=16", f"model.architecture={kind}"]))


def test_the_search_tries_neither_x_nor_selective_recompute() -> None:
    config, cluster = RecurrentConfig("gru", 61, 16), load("h100:1x2")
    seeker = planned_model(config, 8, cluster).seeker(Question(8, 8), 4)
    found = seeker.run()
    assert {one.plan.num_ranks for one in found.best} == {2}
    assert all(one.plan.tensor.x == one.plan.tensor.y == 1 for one in found.best)
    words = [reason for _, reason in found.refused]
    assert any("tensor.x = 2 splits the embedding and the head only" in one for one in words), words
    assert {one.memory.recompute for one in seeker._inner_plans()} == {"none", "full"}
    assert not planned_model(config, 8, cluster).steps.software.compiled
    llama = DecoderConfig(vocab_size=61, hidden_size=16, num_hidden_layers=2, num_attention_heads=4)
    other = planned_model(llama, 8, cluster)
    assert other.steps.software.compiled
    assert other.seeker(Question(8, 8), 4)._reason(Plan(tensor=TensorPlan(2))) is None  # the control


def test_blocks_are_not_compiled_and_asking_for_it_is_refused() -> None:
    cuda = torch.device("cuda")
    assert not wants_compile(load_run(EXAMPLE), cuda)
    assert wants_compile(load_run(EXAMPLE.with_name("quickstart.toml")), cuda)
    with pytest.raises(ConfigError, match=r"torch\.compile would unroll architecture 'lstm' token by token"):
        wants_compile(load_run(EXAMPLE, ["train.compile=true"]), cuda)


def test_initial_values_are_those_of_torchs_layers_with_open_forget_gates() -> None:
    config = RecurrentConfig("lstm", 61, 64)
    weight = initial_value(config, "layers.0.weight_ih", torch.Size((256, 64)), 0)
    assert float(weight.std()) == pytest.approx((1 / (3 * 64)) ** 0.5, rel=0.05)
    assert initial_value(config, "layers.0.bias_ih", torch.Size((8,)), 0).tolist() == [0, 0, 1, 1, 0, 0, 0, 0]
    assert not initial_value(config, "layers.0.bias_hh", torch.Size((8,)), 0).any()
    gru = RecurrentConfig("gru", 61, 64, tie_word_embeddings=True)
    assert not initial_value(gru, "layers.0.bias_ih", torch.Size((6,)), 0).any()
    for one, deviation in ((config, 1.0), (gru, 0.02)):
        found = initial_value(one, "embed_tokens.weight", torch.Size((61, 64)), 0)
        assert float(found.std()) == pytest.approx(deviation, rel=0.05)


def test_layers_on_a_cpu_leave_onednn_out_and_on_for_others() -> None:
    model = build(RecurrentConfig("lstm", 61, 16, 1))
    was_enabled = torch._C._get_mkldnn_enabled()  # other tests run without
    torch._C._set_mkldnn_enabled(True)
    try:
        with OperationNames() as seen:
            model(torch.zeros(2, 5, dtype=torch.long)).sum().backward()
        is_left_on = torch._C._get_mkldnn_enabled()
    finally:
        torch._C._set_mkldnn_enabled(was_enabled)
    assert is_left_on
    assert "aten.mkldnn_rnn_layer.default" not in seen.names
    assert "aten.sigmoid_.default" in seen.names


class OperationNames(TorchDispatchMode):
    """The names of operations."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(str(func))
        return func(*args, **(kwargs or {}))
