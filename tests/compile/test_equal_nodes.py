"""Equal nodes of a traced graph are merged exactly as torch's own pass merges them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch._functorch.aot_autograd import aot_function
from torch._functorch.compile_utils import fx_graph_cse
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx

from weft.compile.torch_partition import merge_equal_nodes
from weft.models import DecoderConfig, GPT2Config, build

SHAPE = (2, 8)


def graph_of(function: Callable[[Tensor], object]) -> fx.Graph:
    """The trace of a function of one matrix."""
    found: fx.Graph = make_fx(function, tracing_mode="fake")(torch.zeros(SHAPE)).graph
    return found


def joint_graph(model: nn.Module) -> fx.Graph:
    """The trace of a model's forward and backward, as the partition of a compiled block uses it."""
    found: list[fx.Graph] = []

    def cut(joint: fx.GraphModule, inputs: object, **keywords: object) -> tuple[fx.GraphModule, fx.GraphModule]:
        copied = fx.Graph()
        copied.output(copied.graph_copy(joint.graph, {}))
        found.append(copied)
        made: tuple[fx.GraphModule, fx.GraphModule] = min_cut_rematerialization_partition(joint, inputs, **keywords)
        return made

    def run(*parameters: Tensor) -> Tensor:
        named = dict(zip(dict(model.named_parameters()), parameters, strict=True))
        result: Tensor = torch.func.functional_call(model, named, (torch.zeros(SHAPE, dtype=torch.long),))
        return result

    kept = {"fw_compiler": lambda gm, _: gm, "bw_compiler": lambda gm, _: gm, "partition_fn": cut}
    aot_function(run, **kept, decompositions=select_decomp_table())(*model.parameters())
    return found[0]


def lines(graph: fx.Graph) -> list[str]:
    return str(graph).splitlines()


def merged_lines(graph: fx.Graph) -> list[str]:
    assert merge_equal_nodes(graph)
    graph.lint()
    return lines(graph)


def equal_twice(x: Tensor) -> Tensor:
    return (x.sin() + 1).exp() * (x.sin() + 1).exp()


def types_differ(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x + 1).cos() * (x + 1.0).cos(), torch.ones(2, dtype=torch.int64) + True


def nested_arguments(x: Tensor) -> Tensor:
    return torch.cat([x, x.sin()]).sum() + torch.cat([x, x.sin()]).sum() + torch.cat([x.sin(), x]).sum()


def several_results(x: Tensor) -> Tensor:
    return torch.split(x, 4, dim=1)[0].sum() + torch.split(x, 4, dim=1)[0].sum() + torch.split(x, 4, dim=1)[1].sum()


def random_twice(x: Tensor) -> Tensor:
    return torch.rand_like(x).sin() + torch.rand_like(x).sin()


def equal_results(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return x.sin(), x.sin(), x.sin().view(-1).cos()


FUNCTIONS = [equal_twice, types_differ, nested_arguments, several_results, random_twice, equal_results]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda one: one.__name__)
def test_a_graph_is_merged_as_torch_merges_it(function: Callable[[Tensor], object]) -> None:
    graph = graph_of(function)
    expected = lines(fx_graph_cse(graph))
    assert merged_lines(graph) == expected


def test_what_is_merged_and_what_stays() -> None:
    """Without this, a pass that merges nothing would be right wherever torch's merges nothing."""
    numbers = {}
    for function in FUNCTIONS:
        graph = graph_of(function)
        before = len(graph.nodes)
        merge_equal_nodes(graph)
        numbers[function.__name__] = before - len(graph.nodes)
    assert numbers["equal_twice"] == 3
    assert numbers["random_twice"] == numbers["equal_results"] == 0
    assert numbers["nested_arguments"] == 4
    assert numbers["several_results"] > 0


@pytest.mark.parametrize(
    "config",
    [
        DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2),
        GPT2Config(vocab_size=64, n_positions=8, n_embd=32, n_layer=1, n_head=2),
    ],
    ids=["llama", "gpt2"],
)
@pytest.mark.full(2)
def test_a_models_forward_and_backward_are_merged_as_torch_merges_them(config: DecoderConfig | GPT2Config) -> None:
    graph = joint_graph(build(config))
    expected, before = lines(fx_graph_cse(graph)), len(graph.nodes)
    assert merged_lines(graph) == expected
    assert len(graph.nodes) < before


def test_a_graph_that_writes_to_arguments_stays() -> None:
    graph = graph_of(lambda x: x.sin().add_(1) + x.sin())
    before = lines(graph)
    assert not merge_equal_nodes(graph)
    assert lines(graph) == before
