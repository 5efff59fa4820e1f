"""Speculative decoding: drafts change no token, sampled answers have the model's distribution, and drafts stop when
they do not pay.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from parallel_serving_for_tests import tokens_on_ranks, whole_model
from sampled_for_tests import some_soak
from serving_for_tests import (
    CONFIGS,
    GREEDY,
    chi_square,
    draft_always,
    likeliest,
    make_engine,
    serve_all,
    tiny_model,
    tokens_of,
)
from torch import Tensor, nn

from weft.architectures import RecurrentConfig
from weft.errors import ConfigError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import DecoderConfig, RecurrentModel, build, initialise
from weft.plan import Pipe, Plan
from weft.plan import Tensor as TensorDegrees
from weft.serve.drafts.drafters import NgramDrafter, NgramIndex
from weft.serve.drafts.model_drafts import ModelDrafter
from weft.serve.engine import Engine, EngineOptions
from weft.serve.head.sampling import gumbel_noise
from weft.serve.http.metrics import ServerMetrics
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.scheduling.request import GeneratedToken, Request, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk
from weft.serve.scheduling.speculation import PROBE_EVERY, DraftLengths, EarlyLayers, may_draft


def repetitive(number: int = 5, seed: int = 0) -> list[tuple[int, ...]]:
    """Prompts with few tokens, in which n-grams are found."""
    rng = random.Random(seed)
    return [tuple(rng.randrange(3) for _ in range(rng.randrange(3, 14))) for _ in range(number)]


def drafters(name: str) -> dict[str, object]:
    """By lookup, by the model's first layer, by a model that is often wrong, by the model itself."""
    models = {"another": tiny_model("qwen3", seed=5), "itself": tiny_model(name)}
    return {"ngram": "ngram", "early": EarlyLayers(1), **models}


@pytest.mark.parametrize("name", some_soak(CONFIGS, "qwen3", "mistral"))
def test_greedy_tokens_are_those_without_drafts_in_any_chunks_and_memory(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft_always(monkeypatch)
    model = tiny_model(name)
    requests = [Request(str(i), prompt, 10, GREEDY) for i, prompt in enumerate(repetitive(4))]
    expected = {one.name: likeliest(model, one.tokens, one.max_tokens) for one in requests}
    for kind, speculate in drafters(name).items():
        scarce = make_engine(
            tiny_model(name), num_blocks=7, token_budget=6, max_running=4, swap_blocks=3, speculate=speculate
        )
        assert tokens_of(serve_all(scarce, requests, every=1)) == expected, kind
        assert scarce.state().num_preempted > 0
        assert scarce.state().num_free_blocks == 7
        ample = make_engine(tiny_model(name), num_blocks=100, speculate=speculate)
        results = serve_all(ample, requests)
        assert tokens_of(results) == expected, kind
        assert all([one.finish for one in found][-1] == "length" for found in results.values())
        state = ample.state()
        assert state.num_drafted > 0
        if kind == "itself":
            assert state.num_accepted == state.num_drafted  # every draft is right, also after pre-emption
        if kind == "another":
            assert state.num_accepted < state.num_drafted


def test_a_seed_gives_its_tokens_with_any_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    settings = [Sampling(0.7, seed=1), Sampling(1.2, top_k=8, seed=2), Sampling(1.0, top_p=0.6, min_p=0.05, seed=3)]
    settings += [Sampling(repetition_penalty=1.4, seed=4), Sampling(0.5, logit_bias={3: 4.0}, num_logprobs=2, seed=5)]
    requests = [Request(str(i), repetitive()[i], 14, one) for i, one in enumerate(settings)]
    expected = serve_all(make_engine(tiny_model("llama")), requests)
    for kind, speculate in drafters("llama").items():
        engine = make_engine(tiny_model("llama"), speculate=speculate)
        found = serve_all(engine, requests)
        assert tokens_of(found) == tokens_of(expected), kind
        assert engine.state().num_accepted > 0
        for one, other in zip(found["4"], expected["4"], strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs.token == pytest.approx(other.logprobs.token, abs=1e-4)


def test_requests_with_cancels_and_stops_leak_no_block() -> None:
    rng, model = random.Random(7), tiny_model("qwen3")
    answers = {prompt: likeliest(model, prompt, 13) for prompt in repetitive(12, 3)}
    for speculate in drafters("qwen3").values():
        engine = make_engine(model, num_blocks=8, token_budget=9, max_running=5, speculate=speculate)
        waiting = [
            Request(str(i), prompt, rng.randrange(1, 14), GREEDY, frozenset([rng.randrange(61)]))
            for i, prompt in enumerate(repetitive(12, 3))
        ]
        requests, found = {one.name: one for one in waiting}, dict[str, list[GeneratedToken]]()
        cancelled = set[str]()
        while waiting or engine.has_work():
            if waiting and rng.random() < 0.6:
                engine.add(waiting.pop())
            if rng.random() < 0.1:
                cancelled.add(str(rng.randrange(12)))
                engine.cancel(str(rng.choice(sorted(cancelled))))
            for one in engine.step():
                found.setdefault(one.request, []).append(one)
        assert engine.state().num_free_blocks == 8
        for name, tokens in found.items():
            assert [one.token for one in tokens] == answers[requests[name].tokens][: len(tokens)]
            stops = [one.token in requests[name].stop_tokens for one in tokens]
            assert not any(stops[:-1])
            assert (tokens[-1].finish == "stop") == stops[-1]


NUM_SYMBOLS, NUM_REQUESTS, PROMPT = 6, 400, (3, 1, 4)
LIMIT = 82.0  # of chi-square with 35 degrees of freedom: exceeded with a probability of 1e-5


class ConstantDrafter:
    """Always drafts the same tokens."""

    context_length = 1 << 62

    def draft(self, wanted: Sequence[tuple[ActiveRequest, int]]) -> list[list[int]]:
        return [[1, 2, 3, 1][:number] for _, number in wanted]


def pair_probabilities(model: nn.Module, temperature: float) -> Tensor:
    """Of the second and third token after PROMPT, [NUM_SYMBOLS, NUM_SYMBOLS]."""

    def after(tokens: Tensor) -> Tensor:
        with torch.inference_mode():
            logits: Tensor = model(torch.cat([torch.tensor(PROMPT).expand(len(tokens), -1), tokens], 1))[:, -1]
        return (logits[:, :NUM_SYMBOLS].double() / temperature).softmax(-1)

    symbols = torch.arange(NUM_SYMBOLS)
    first = after(torch.empty(1, 0, dtype=torch.int64))[0]
    second = after(symbols[:, None])
    pairs = torch.cartesian_prod(symbols, symbols)
    third = after(pairs).view(NUM_SYMBOLS, NUM_SYMBOLS, NUM_SYMBOLS)
    return torch.einsum("a,ab,abc->bc", first, second, third)


def pair_counts(model: nn.Module, speculate: object, temperature: float) -> tuple[Engine, Tensor]:
    number = NUM_REQUESTS
    sizes = {"num_blocks": 2 * number, "max_running": number, "token_budget": 9 * number, "max_waiting": number}
    engine = make_engine(model, **sizes, vocab_size=NUM_SYMBOLS, speculate="ngram", prefix_cache=False)
    if isinstance(speculate, nn.Module | EarlyLayers):
        engine = make_engine(model, **sizes, vocab_size=NUM_SYMBOLS, speculate=speculate, prefix_cache=False)
    elif speculate == "constant":
        assert engine._speculation is not None
        engine._speculation._drafter = ConstantDrafter()
    sampling = [Sampling(temperature, seed=seed) for seed in range(NUM_REQUESTS)]
    found = tokens_of(serve_all(engine, [Request(str(i), PROMPT, 4, one) for i, one in enumerate(sampling)]))
    tokens = torch.tensor(list(found.values()))
    return engine, torch.bincount(tokens[:, 1] * NUM_SYMBOLS + tokens[:, 2], minlength=NUM_SYMBOLS**2)


@pytest.mark.parametrize("drafter", ["constant", "early", "model"])
@pytest.mark.full(2)
def test_sampled_tokens_have_the_models_distribution(drafter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, temperature = tiny_model("llama"), 2.0
    if drafter == "early":  # the first layer alone must give another distribution
        temperature = 0.5
        with torch.no_grad():
            model.model.layers[1].mlp.down_proj.weight.mul_(60)
    speculate = {"model": tiny_model("qwen3", seed=5), "early": EarlyLayers(1)}.get(drafter, drafter)
    probabilities = pair_probabilities(model, temperature).flatten()
    engine, counts = pair_counts(model, speculate, temperature)
    assert engine.state().num_accepted > NUM_REQUESTS / 20
    assert chi_square(counts, probabilities) < LIMIT

    def accept_all(self: Engine, chunk: ScheduledChunk, tokens: Sequence[int]) -> list[GeneratedToken]:
        """The control: drafts are taken for answers."""
        return take_valid(self, chunk, [*chunk.drafts, *tokens[-1:]] if chunk.drafts else tokens)

    take_valid = Engine._take_valid
    monkeypatch.setattr(Engine, "_take_valid", accept_all)
    _, counts = pair_counts(model, speculate, temperature)
    assert chi_square(counts, probabilities) > 1.5 * LIMIT


def test_drafts_are_accepted_as_often_as_shared_noise_makes_two_draws_agree() -> None:
    number, size = 40_000, 32
    generator = torch.Generator().manual_seed(2)
    model = torch.randn(size, generator=generator).double().softmax(0)
    draft = (model.log() + 0.7 * torch.randn(size, generator=generator)).softmax(0)
    noise = gumbel_noise(torch.tensor([[9, 0]], dtype=torch.int32).expand(number, 2), torch.arange(number), size)
    drawn = (noise + model.log()).argmax(1)
    ratios = torch.maximum(model[None] / model[:, None], draft[None] / draft[:, None])
    expected = float((1 / ratios.sum(1)).sum())
    assert float((drawn == (noise + draft.log()).argmax(1)).double().mean()) == pytest.approx(expected, abs=0.01)
    most = float(torch.minimum(model, draft).sum())  # no coupling agrees more often
    assert (1 - (1 - most)) / (1 + (1 - most)) < expected < most
    # A draft that is no random draw is accepted with its probability, which is the most there is.
    assert float((drawn == 3).double().mean()) == pytest.approx(float(model[3]), abs=0.005)


def active(tokens: Sequence[int]) -> ActiveRequest:
    return ActiveRequest(Request("x", tuple(tokens), 9), 0, 99, 0, list(tokens))


def test_drafts_stop_when_they_do_not_pay_and_are_tried_again() -> None:
    lengths, request = DraftLengths(most=8), active([1])
    assert lengths.wanted(request) > 1  # nothing is known of times: drafts seem to cost nothing
    for _ in range(60):  # a step of n tokens takes 1 + n / 2 ms: drafts cost much
        for tokens in (1, 5):
            lengths.times.add(tokens, 0.001 + 0.0005 * tokens, 1)
    assert lengths.times.seconds_per_token == pytest.approx(0.0005)
    for _ in range(30):
        lengths.record(request, 4, 0)
    assert [lengths.wanted(request) for _ in range(PROBE_EVERY)] == [0] * (PROBE_EVERY - 1) + [1]
    for _ in range(60):
        lengths.record(request, 1, 1)
    assert lengths.wanted(request) == 8
    dear = DraftLengths(most=8)  # a draft costs more than a step alone gives: even sure drafts do not pay
    for _ in range(60):
        for tokens in (1, 5):
            dear.times.add(tokens, 0.001 * tokens, 4)
    for _ in range(60):
        dear.record(request, 1, 1)
    assert dear.wanted(request) == 0


def test_drafts_behind_a_rejected_one_count_neither_for_nor_against() -> None:
    lengths, long, short = DraftLengths(most=8), active([1]), active([1])
    for _ in range(20):
        lengths.record(long, 8, 1)
        lengths.record(short, 2, 1)
    assert lengths.wanted(long) == lengths.wanted(short) == 4  # half of them are right: 1/2 ** 4 is worth its memory


def test_lookup_finds_what_followed_and_goes_round() -> None:
    index = NgramIndex()
    index.add([1, 2, 3, 9, 1, 2])
    assert index.following([1, 2, 3, 9, 1, 2], 3) == [3, 9, 1]
    assert index.following([1, 2, 3, 9, 1, 2], 6) == [3, 9, 1, 2, 3, 9]
    index.add([1, 2, 3, 9, 1, 2, 7, 7, 7])
    assert index.following([1, 2, 3, 9, 1, 2, 7, 7, 7], 3) == [7, 7, 7]
    assert index.following([5, 6], 3) == []
    assert NgramDrafter().draft([(active([1, 2, 3, 1, 2]), 2), (active([1]), 4)]) == [[3, 1], []]


def test_requests_whose_rules_depend_on_all_tokens_get_no_drafts() -> None:
    assert may_draft(active([1]))
    for sampling in (Sampling(repetition_penalty=1.1), Sampling(presence_penalty=0.1), Sampling(frequency_penalty=1)):
        assert not may_draft(ActiveRequest(Request("x", (1,), 9, sampling), 0, 99, 0, [1]))


def test_a_draft_model_with_fewer_tokens_is_refused() -> None:
    small = build(DecoderConfig(vocab_size=60, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                num_attention_heads=1, num_key_value_heads=1))  # fmt: skip
    initialise(small, 0)
    with pytest.raises(ConfigError, match="knows 60 tokens and the model 61; give a draft model with the same token"):
        make_engine(tiny_model("llama"), speculate=small)


def test_a_draft_model_drafts_up_to_the_positions_that_it_knows() -> None:
    small = build(replace(CONFIGS["llama"], max_position_embeddings=20))
    initialise(small, 0)
    for context, known in ((50, 20), (12, 12)):
        engine = make_engine(tiny_model("llama"), speculate=small, context_length=context)
        assert engine._speculation is not None
        drafter = engine._speculation._drafter
        assert isinstance(drafter, ModelDrafter)
        assert drafter.context_length == known


def test_a_recurrent_draft_model_is_refused() -> None:
    small = RecurrentModel(RecurrentConfig("lstm", 61, 8))
    with pytest.raises(ConfigError, match="an LSTM or GRU cannot draft"):
        make_engine(tiny_model("llama"), speculate=small, num_blocks=20)


def test_metrics_name_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    draft_always(monkeypatch)
    engine = make_engine(tiny_model("llama"), speculate=tiny_model("llama"))
    serve_all(engine, [Request("x", (1, 2, 3), 9, GREEDY)])
    state, text = engine.state(), ServerMetrics().text(engine.state(), 0)
    assert state.num_accepted > 0
    assert f"weft_draft_tokens_total {state.num_drafted}\n" in text
    assert f"weft_accepted_draft_tokens_total {state.num_accepted}\n" in text


@pytest.mark.processes
def test_two_ranks_with_drafts_give_the_tokens_of_one_without() -> None:
    cases = [("llama", Plan(tensor=TensorDegrees(2))), ("qwen2", Plan(pipe=Pipe(2)))]
    for name, plan in cases:
        refuse_plan(CONFIGS[name], plan)
    requests = [Request(str(i), prompt, 12, GREEDY) for i, prompt in enumerate(repetitive())]
    sizes = {"block_size": 4, "num_blocks": 12, "token_budget": 12, "max_running": 4}

    def rank(_: int) -> list[object]:
        torch.set_num_threads(1)
        results = []
        for name, plan in cases:
            for speculate in ("ngram", whole_model("qwen3")):
                options = EngineOptions(**sizes, speculate=speculate)  # type: ignore[arg-type]
                results.append(tokens_on_ranks(name, Mesh(plan), requests, options))
        return results

    found = run_local(rank, 2, 300.0)[0]
    for (name, _), *results in zip(cases, found[::2], found[1::2], strict=True):
        expected = tokens_of(serve_all(Engine(whole_model(name), EngineOptions(**sizes)), requests))  # type: ignore[arg-type]
        for one in results:
            assert one["tokens"] == expected
            assert one["is_free"]
