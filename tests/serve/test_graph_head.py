"""The head by graph search: the points' identity, a full beam is the dense head, and what needs more is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serving_for_tests import GREEDY, likeliest, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor

from weft.errors import ConfigError
from weft.serve.head.graph_head import (
    GraphHead,
    VocabularyGraph,
    build_graph,
    graph_head,
    load,
    output_identity,
    output_matrix,
    points_of,
    save,
    search,
    with_chosen_beam,
)
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.scheduling.speculation import EarlyLayers

NUM_TOKENS, WIDTH = 600, 12


def some_matrix(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Rows in clusters of unequal norms, large biases, and queries; in float64."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(20, WIDTH, generator=generator, dtype=torch.float64)
    weight = centres[torch.randint(20, (NUM_TOKENS,), generator=generator)]
    weight = weight + 0.5 * torch.randn(NUM_TOKENS, WIDTH, generator=generator, dtype=torch.float64)
    weight = weight * (0.3 + torch.rand(NUM_TOKENS, 1, generator=generator, dtype=torch.float64))
    bias = 3 * torch.randn(NUM_TOKENS, generator=generator, dtype=torch.float64)
    return weight, bias, torch.randn(40, WIDTH, generator=generator, dtype=torch.float64)


def test_the_nearest_point_has_the_highest_logit() -> None:
    weight, bias, queries = some_matrix()
    points = points_of(weight, bias)
    norms = points.norm(dim=1)
    assert float((norms / norms[0] - 1).abs().max()) < 1e-12
    wide = torch.cat([queries, torch.ones(40, 1), torch.zeros(40, 1)], dim=1)
    by_distance = torch.cdist(wide, points, compute_mode="donot_use_mm_for_euclid_dist").argsort(1)
    by_logit = (queries @ weight.T + bias).argsort(1, descending=True)
    assert torch.equal(by_distance, by_logit)
    without_bias = points_of(weight, None)  # the control: U without the biases
    without_bias[:, -2] = bias
    wrong = torch.cdist(wide, without_bias, compute_mode="donot_use_mm_for_euclid_dist").argsort(1)
    assert not torch.equal(wrong[:, 0], by_logit[:, 0])


def reached(graph: VocabularyGraph) -> int:
    is_reached = torch.zeros(len(graph.edges), dtype=torch.bool)
    frontier = graph.entries
    while len(frontier):
        is_reached[frontier] = True
        following = graph.edges[frontier].unique()
        frontier = following[~is_reached[following]]
    return int(is_reached.sum())


@pytest.mark.parametrize("degree", [2, 8, 32])
def test_a_full_beam_is_the_dense_head_and_a_wider_one_finds_more(degree: int) -> None:
    weight, bias, queries = some_matrix()
    graph = build_graph(weight, bias, degree)
    assert reached(graph) == NUM_TOKENS
    recalls = []
    for beam in (10, 60, NUM_TOKENS):
        num_found = 0
        for query in queries:
            found = search(graph, lambda tokens, at=query: weight[tokens] @ at + bias[tokens], 10, beam)
            dense = weight @ query + bias
            expected = dense.topk(10).indices
            num_found += len(set(found.tokens.tolist()) & set(expected.tolist()))
            torch.testing.assert_close(found.logits, dense[found.tokens], rtol=1e-12, atol=1e-12)
            if beam == NUM_TOKENS:
                assert torch.equal(found.tokens, expected)
                assert found.num_scored == NUM_TOKENS
            else:
                assert found.num_scored < NUM_TOKENS
        recalls.append(num_found / 400)
    assert recalls == sorted(recalls)
    assert recalls[-1] == 1.0
    cut = VocabularyGraph(torch.arange(NUM_TOKENS)[:, None], graph.entries)  # the control: no edges
    assert search(cut, lambda tokens: weight[tokens] @ queries[0], 10, NUM_TOKENS).num_scored == len(graph.entries)


def test_of_equal_logits_the_lowest_token_is_first() -> None:
    weight = torch.ones(50, 3)
    found = search(build_graph(weight, None, 6), lambda tokens: weight[tokens].sum(1), 5, 50)
    assert found.tokens.tolist() == [0, 1, 2, 3, 4]


def head_of(name: str, number: int = 8, beam: int = 61) -> GraphHead:
    model = tiny_model(name)
    graph = build_graph(*output_matrix(model, 61), degree=6)
    return GraphHead(graph, output_identity(model, 61), number, beam, num_scored=1.0)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen2"])
@pytest.mark.full(2)
def test_an_engine_with_a_full_beam_gives_the_tokens_of_one_without(name: str) -> None:
    greedy = [Request(str(i), tuple(range(i, i + 9)), 9, GREEDY) for i in range(3)]
    drawn = [Request(f"t{i}", tuple(range(i, i + 9)), 9, Sampling(0.8, top_k=8, seed=i)) for i in range(3)]
    expected = tokens_of(serve_all(make_engine(tiny_model(name)), [*greedy, *drawn]))
    for speculate in (None, "ngram", EarlyLayers(1)):
        engine = make_engine(tiny_model(name), head=head_of(name), speculate=speculate)
        assert tokens_of(serve_all(engine, [*greedy, *drawn])) == expected
    assert expected["0"] == likeliest(tiny_model(name), greedy[0].tokens, 9)
    lost = replace(head_of(name), number=1, beam=1)  # the control: a beam that loses the likeliest tokens
    narrow = VocabularyGraph(lost.graph.edges[:, :1], lost.graph.entries[:1])
    wrong = make_engine(tiny_model(name), head=replace(lost, graph=narrow))
    assert tokens_of(serve_all(wrong, greedy)) != {one.name: expected[one.name] for one in greedy}


@torch.inference_mode()
def test_steps_of_many_rows_use_the_dense_head() -> None:
    head = replace(head_of("llama"), num_scored=10.0)
    assert head.pays_for(2)
    assert not head.pays_for(3)
    hidden, linear = torch.randn(3, 16), tiny_model("llama").lm_head
    assert not bool(head.logits(hidden, linear).isinf().any())
    some = head.logits(hidden[:2], linear)
    assert (~some.isinf()).sum(1).tolist() == [8, 8]
    torch.testing.assert_close(some.topk(8).values, linear(hidden[:2]).topk(8).values)


def test_requests_that_need_other_logits_are_refused_in_words() -> None:
    engine = make_engine(tiny_model("llama"), head=head_of("llama"))
    for sampling, words in [
        (Sampling(0.7), "give temperature 0 or a top_k from 1 to 8"),
        (Sampling(0.7, top_k=9), "finds the 8 highest"),
        (Sampling(0, num_logprobs=1), "num_logprobs needs the logits of all tokens"),
        (Sampling(0, frequency_penalty=1.0), "frequency_penalty needs"),
        (Sampling(0, logit_bias={3: 1.0}), "logit_bias needs"),
    ]:
        with pytest.raises(RequestError, match=words):
            engine.check(Request("x", (1,), 2, sampling))
    loose = make_engine(tiny_model("llama"), head=replace(head_of("llama"), is_approximate=True))
    loose.check(Request("x", (1,), 2, Sampling(0.7)))


def test_the_beam_is_the_least_that_finds_the_likeliest() -> None:
    weight, bias, _ = some_matrix()
    states = torch.randn(100, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    head, tried = with_chosen_beam(GraphHead(build_graph(weight, bias, 6), "", number=4), weight, bias, states)
    assert [beam for beam, _, _ in tried] == [4 * 2**index for index in range(len(tried))]
    assert len(tried) > 1
    assert head.beam == tried[-1][0]
    assert tried[-1][1] >= 0.999
    assert all(agreement < 0.999 for _, agreement, _ in tried[:-1])
    assert head.num_scored == tried[-1][2]


def test_other_weights_and_damaged_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.safetensors"
    save(path, head_of("llama"))
    read = load(path)
    assert torch.equal(read.graph.edges, head_of("llama").graph.edges)
    assert (read.number, read.beam, read.num_scored) == (8, 61, 1.0)
    loose = graph_head(f"approximate-graph={path}")
    assert loose is not None
    assert loose.is_approximate
    model = tiny_model("llama")
    with torch.no_grad():
        model.lm_head.weight[3, 4] += 1e-3
    with pytest.raises(ConfigError, match="of another output matrix; run weft index"):
        make_engine(model, head=read)
    with pytest.raises(ConfigError, match="run weft index on the served model, and serve it without --precision"):
        make_engine(tiny_model("llama").bfloat16(), head=read)
    with pytest.raises(ConfigError, match="is of 61 tokens, and 60 are served"):
        make_engine(tiny_model("llama"), head=read, vocab_size=60)
    engine = make_engine(tiny_model("llama"), head=read)
    with pytest.raises(ConfigError, match="--follow replaces weights, which the graph of --head is made of"):
        engine.replace_weights(tiny_model("llama"))
    whole = path.read_bytes()
    for name, other in ((b'"beam"', b'"boom"'), (b'"number":"8"', b'"number":"x"')):  # one is missing, one no number
        assert whole.count(name) == 1
        path.write_bytes(whole.replace(name, other))
        with pytest.raises(ConfigError, match="damaged"):
            load(path)
    path.write_bytes(whole[:-100])
    with pytest.raises(ConfigError, match="run weft index"):
        load(path)
    with pytest.raises(ConfigError, match="--head tree is unknown"):
        graph_head("tree")
