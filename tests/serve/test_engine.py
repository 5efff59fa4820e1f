"""The engine's tokens: equal to transformers' and to plain forwards, whatever the chunks, arrivals and memory."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import torch
from sampled_for_tests import some_soak
from serving_for_tests import CONFIGS, CONTEXT, GREEDY, MODELS, likeliest, make_engine, serve_all, tiny_model, tokens_of
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.models import save_folder
from weft.serve.engine import Engine, EngineOptions, LaunchedStep
from weft.serve.model import model_part
from weft.serve.model.cache_memory import HostPages
from weft.serve.model.step_graphs import DecodeGraphs, MixedGraphs, Replay, graph_sizes, mixed_sizes
from weft.serve.model.step_inputs import StepInputs
from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.scheduling.scheduler import ActiveRequest

LENGTHS = (1, 2, 9, 16, 17, CONTEXT - 1, CONTEXT)


def prompts(seed: int = 0) -> list[tuple[int, ...]]:
    rng = random.Random(seed)
    return [tuple(rng.randrange(61) for _ in range(length)) for length in LENGTHS]


def by_transformers(model: nn.Module, folder: Path, requests: list[Request]) -> dict[str, list[int]]:
    from transformers import AutoModelForCausalLM

    save_folder(folder, model)  # type: ignore[arg-type]
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    theirs.generation_config.eos_token_id = None
    theirs.generation_config.pad_token_id = 0
    found = {}
    for one in requests:
        number = min(one.max_tokens, CONTEXT + 1 - len(one.tokens))
        given = torch.tensor([one.tokens])  # token 0 is no padding
        ids = theirs.generate(given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=number)
        found[one.name] = ids[0, len(one.tokens) :].tolist()
    return found


@pytest.mark.parametrize("name", some_soak(CONFIGS, *MODELS))
@pytest.mark.full(2)
def test_tokens_are_those_of_transformers_in_any_chunks_order_and_memory(name: str, tmp_path: Path) -> None:
    model = tiny_model(name)
    requests = [Request(f"{len(prompt)}", prompt, 12, GREEDY) for prompt in prompts()]
    expected = by_transformers(model, tmp_path, requests)
    assert len({tuple(tokens) for tokens in expected.values()}) > 3  # the model is not constant
    scarce = make_engine(model, num_blocks=9, token_budget=4, max_running=4, overlap=True)
    assert tokens_of(serve_all(scarce, requests, every=1)) == expected
    assert scarce.state().num_preempted > 0
    assert scarce.state().num_free_blocks == 9
    ample = make_engine(model, num_blocks=100, token_budget=500, overlap=False)
    results = serve_all(ample, reversed(requests))
    assert tokens_of(results) == expected
    assert all([one.finish for one in found] == [None] * (len(found) - 1) + ["length"] for found in results.values())
    for one in requests[1:3]:
        assert tokens_of(serve_all(make_engine(model), [one])) == {one.name: expected[one.name]}


@pytest.mark.parametrize(
    ("name", "num_tokens"),
    [("qwen3", 2), *(pytest.param(name, 12, marks=pytest.mark.soak) for name in CONFIGS)],
)
def test_a_batch_of_64_gives_the_tokens_of_transformers_for_prompts_up_to_the_context(
    name: str, num_tokens: int, tmp_path: Path
) -> None:
    model, rng = tiny_model(name), random.Random(name)
    lengths = [1, CONTEXT - 1, CONTEXT, *(rng.randint(1, CONTEXT) for _ in range(61))]
    requests = [
        Request(str(i), tuple(rng.randrange(61) for _ in range(length)), num_tokens, GREEDY)
        for i, length in enumerate(lengths)
    ]
    expected = by_transformers(model, tmp_path, requests)
    engine = make_engine(model, num_blocks=64 * 9, max_running=64, token_budget=64 * CONTEXT)
    for one in requests:
        engine.add(one)
    found = {one.request: [one.token] for one in engine.step()}
    assert len(found) == 64  # one step computes them all
    while engine.has_work():
        for one in engine.step():
            found[one.request].append(one.token)
    assert found == expected


@cache
def fifty() -> tuple[nn.Module, list[Request], list[list[int]]]:
    """A model, requests, and their tokens by plain forwards."""
    rng, model = random.Random(7), tiny_model("qwen3")
    requests = [
        Request(str(i), tuple(rng.randrange(3) for _ in range(rng.randrange(1, 12))), rng.randrange(1, 14), GREEDY)
        for i in range(50)
    ]
    return model, requests, [likeliest(model, one.tokens, one.max_tokens) for one in requests]


@pytest.mark.parametrize(("overlap", "swap_blocks"), [(False, 0), (True, 0), (True, 4)])
@pytest.mark.full(2)
def test_fifty_requests_with_cancels_give_no_wrong_token_and_leak_no_block(overlap: bool, swap_blocks: int) -> None:
    rng, (model, requests, answers) = random.Random(8), fifty()
    sizes = {"num_blocks": 8, "token_budget": 9, "max_running": 5, "swap_blocks": swap_blocks}
    engine = make_engine(model, **sizes, overlap=overlap)
    waiting, found, cancelled, held = list(requests), dict[str, list[int]](), set[str](), set[str]()
    while waiting or engine.has_work():
        if waiting and rng.random() < 0.6:
            held.add(waiting[-1].name)
            engine.add(waiting.pop())
        if rng.random() < 0.2:
            name = str(rng.randrange(50))
            engine.cancel(name)
            cancelled |= held & {name}
        for one in engine.step():
            assert one.request not in cancelled
            held -= {one.request} if one.finish else set()
            found.setdefault(one.request, []).append(one.token)
    engine.step()
    state = engine.state()
    assert (state.num_free_blocks, state.num_running, state.num_waiting) == (8, 0, 0)
    assert state.num_preempted > 0
    assert (state.num_swapped > 0) == (swap_blocks > 0)
    assert engine._scheduler.swap is None or engine._scheduler.swap.num_free == swap_blocks  # type: ignore[attr-defined]
    assert state.num_prefix_tokens > 0
    whole = 0
    for one, expected in zip(requests, answers, strict=True):
        tokens = found.get(one.name, [])
        assert tokens == expected[: len(tokens)]
        assert len(tokens) == len(expected) or one.name in cancelled
        whole += len(tokens) == len(expected)
    assert whole > 20


class FakeRecorder:
    """Stands for the GPU's recorder: a replay computes again, from what the inputs hold then."""

    def __init__(self) -> None:
        self.num_rows: list[int] = []

    def __call__(self, compute: object) -> tuple[Tensor, Replay]:
        result: Tensor = compute()  # type: ignore[operator]
        self.num_rows.append(len(result))
        return result, lambda: result.copy_(compute())  # type: ignore[operator, return-value]


def refuse(compute: object) -> tuple[Tensor, Replay]:
    raise RuntimeError("operation not permitted when stream is capturing")


def test_decodes_by_graphs_are_padded_to_the_next_size_and_change_nothing() -> None:
    model, recorder = tiny_model("llama"), FakeRecorder()
    requests = [Request(str(i), (i + 1, 5, 7), 3 + 2 * i, GREEDY) for i in range(6)]
    for record in (recorder, refuse):
        engine = make_engine(model, max_running=6, overlap=True)
        given = (engine._part.paged, engine._part.cache, engine._sampler.last, engine._part.layout, CONTEXT)
        engine._graphs = DecodeGraphs(*given, graph_sizes(6), record)
        if record is refuse:
            with pytest.warns(UserWarning, match="cannot be captured .* going on without CUDA graphs"):
                results = tokens_of(serve_all(engine, requests))
        else:
            for capture in engine.captures():
                capture()
            results = tokens_of(serve_all(engine, requests))
        assert results == {one.name: likeliest(model, one.tokens, one.max_tokens) for one in requests}
    assert recorder.num_rows == [6, 4, 2, 1]
    assert graph_sizes(200) == [1, 2, 4, 8, 16, 32, 48, 64, 80, 96, 112, 128, 160, 192, 200]


def recorded(run: Callable[[StepInputs], object], sizes: list[int]) -> Callable[[StepInputs], object]:
    """The function, which also notes how many tokens it computes."""

    def noting(inputs: StepInputs) -> object:
        sizes.append(inputs.num_tokens)
        return run(inputs)

    return noting


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral"])
def test_steps_with_prompts_by_graphs_are_padded_to_the_next_size_and_change_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks, beside decodes and alone, some of which a step too large for graphs computes."""
    model, recorder = tiny_model(name), FakeRecorder()
    requests = [Request(str(i), one, min(9, CONTEXT + 1 - len(one)), GREEDY) for i, one in enumerate(prompts())]
    for record in (recorder, refuse):
        engine = make_engine(model, max_running=6, token_budget=24, overlap=True)
        part = engine._part
        given = (part.paged, part.cache, engine._sampler.last, part.layout, CONTEXT, mixed_sizes(20), record)
        engine._mixed_graphs = graphs = MixedGraphs(*given)
        sizes = list[int]()
        monkeypatch.setattr(graphs, "run", recorded(graphs.run, sizes))
        if record is refuse:
            with pytest.warns(UserWarning, match="steps of .* tokens cannot be captured .* without CUDA graphs"):
                results = tokens_of(serve_all(engine, requests, every=2))
        else:
            for capture in engine.captures():
                capture()
            results = tokens_of(serve_all(engine, requests, every=2))
        assert results == {one.name: likeliest(model, one.tokens, one.max_tokens) for one in requests}
        assert min(sizes) < 16 < max(sizes) <= 20
    assert recorder.num_rows == [20, 16]
    assert mixed_sizes(1200) == [16, 32, *range(64, 1024, 64), 1024, 1152, 1200]


def test_a_shared_prompt_is_computed_once_and_never_for_another_tenant() -> None:
    model, prompt = tiny_model("llama"), tuple(range(20))
    engine = make_engine(model)
    expected = likeliest(model, prompt, 4)
    for tenant, num_cached, num_shared in (("a", 0, 0), ("a", 16, 16), ("b", 0, 16), ("b", 16, 32)):
        results = serve_all(engine, [Request("x", prompt, 4, GREEDY, tenant=tenant)])
        assert tokens_of(results)["x"] == expected
        assert {token.num_cached for token in results["x"]} == {num_cached}
        assert engine.state().num_prefix_tokens == num_shared
    without = make_engine(model, prefix_cache=False)
    for name in "xy":
        assert tokens_of(serve_all(without, [Request(name, prompt, 4, GREEDY)]))[name] == expected
    assert without.state().num_prefix_tokens == 0


@pytest.mark.parametrize("overlap", [False, True])
def test_new_weights_answer_from_the_next_step_on_for_requests_that_run(overlap: bool) -> None:
    old, new, prompt = tiny_model("mistral"), tiny_model("mistral", seed=1), (3, 1, 4, 1, 5, 9)
    engine = make_engine(tiny_model("mistral"), overlap=overlap)
    engine.add(Request("x", prompt, 12, GREEDY))
    tokens = [one.token for _ in range(5) for one in engine.step()]
    engine.replace_weights(new)
    num_old = engine.state().num_generated
    while engine.has_work():
        tokens += [one.token for one in engine.step()]
    assert tokens[:num_old] == likeliest(old, prompt, num_old)
    assert tokens[num_old:] == likeliest(new, (*prompt, *tokens[:num_old]), 12 - num_old)
    assert tokens[num_old:] != likeliest(old, (*prompt, *tokens[:num_old]), 12 - num_old)
    again = tokens_of(serve_all(engine, [Request("y", prompt, 3, GREEDY)]))["y"]
    assert again == likeliest(new, prompt, 3)
    with pytest.raises(ConfigError, match="give weights of the same model"):
        engine.replace_weights(tiny_model("llama"))


def test_a_stop_token_ends_a_request_and_is_reported() -> None:
    model = tiny_model("llama")
    expected = likeliest(model, (1, 2, 3), 8)
    stop = expected[3]
    number = expected.index(stop) + 1
    for overlap in (False, True):
        engine = make_engine(model, overlap=overlap)
        found = serve_all(engine, [Request("x", (1, 2, 3), 8, GREEDY, frozenset([stop]))])["x"]
        assert [one.token for one in found] == expected[:number]
        assert found[-1].finish == "stop"
        assert engine.state().num_free_blocks == 40


def test_log_probabilities_are_the_models_own() -> None:
    model = tiny_model("gpt2")
    sampling = Sampling(temperature=0, num_logprobs=3, logit_bias={7: 50.0})
    found = serve_all(make_engine(model), [Request("x", (1, 2, 3), 2, sampling), Request("y", (4,), 3, GREEDY)])
    assert [one.token for one in found["x"]] == [7, 7]
    assert all(one.logprobs is None for one in found["y"])
    for position, one in enumerate(found["x"]):
        with torch.inference_mode():
            expected = model(torch.tensor([[1, 2, 3, *[7] * position]]))[0, -1].log_softmax(-1)
        values, tokens = expected.topk(3)
        assert one.logprobs is not None
        assert one.logprobs.token == pytest.approx(float(expected[7]), abs=1e-5)
        assert [token for token, _ in one.logprobs.likeliest] == tokens.tolist()
        assert [value for _, value in one.logprobs.likeliest] == pytest.approx(values.tolist(), abs=1e-5)


def test_a_prompt_is_scored_as_by_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_part, "_SCORED_ROWS", 4)  # logits are computed in three parts
    model, prompt = tiny_model("llama"), (5, 6, 7, 8, 9, 10, 11, 12, 13, 14)
    engine = make_engine(model, vocab_size=50)
    with torch.inference_mode():
        expected = model(torch.tensor([prompt]))[0, :, :50].log_softmax(-1)
    found = engine.score(Request("x", prompt, 0, Sampling(num_logprobs=2)))
    assert [one.token for one in found] == pytest.approx(
        [float(expected[place, token]) for place, token in enumerate(prompt[1:])], abs=1e-5
    )
    values, tokens = expected[:-1].topk(2)
    assert [[token for token, _ in one.likeliest] for one in found] == tokens.tolist()
    assert [value for one in found for _, value in one.likeliest] == pytest.approx(values.flatten().tolist(), abs=1e-5)
    assert engine.score(Request("one", (5,), 1)) == []
    with torch.no_grad():
        model.lm_head.weight.fill_(math.nan)  # type: ignore[union-attr, operator]
    with pytest.raises(NumbersError, match="NaN"):
        engine.score(Request("x", prompt, 1))


def test_embeddings_are_pooled_hidden_states() -> None:
    model = tiny_model("llama")
    engine = make_engine(model)
    with torch.inference_mode():
        hidden = model.model(torch.tensor([[5, 6, 7]]))[0]  # type: ignore[operator, union-attr]
    torch.testing.assert_close(engine.embed([5, 6, 7], "mean"), hidden.mean(0))
    torch.testing.assert_close(engine.embed([5, 6, 7], "last"), hidden[-1])


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_texts_are_computed_in_free_blocks_a_few_tokens_at_a_time(kind: str) -> None:
    """Requests that hold the blocks are computed again, and get the tokens that they would get without texts."""
    model, text = tiny_model(kind).double(), tuple(one % 7 + 1 for one in range(27))
    whole, few = make_engine(model), make_engine(model, num_blocks=8, token_budget=4, max_running=3)
    assert few.num_slots == 32
    requests = [Request(str(index), (index, 5, 3), 8, GREEDY) for index in range(1, 4)]
    expected = tokens_of(serve_all(make_engine(model), requests))
    for one in requests:
        few.add(one)
    found: dict[str, list[int]] = {one.name: [] for one in requests}
    for number in range(100):
        if number % 3 == 2:
            for pool in ("mean", "last"):
                torch.testing.assert_close(few.embed(text, pool), whole.embed(text, pool), rtol=1e-6, atol=1e-6)
            pairs = zip(few.score(Request("x", text, 1)), whole.score(Request("x", text, 1)), strict=True)
            for mine, theirs in pairs:
                assert mine.token == pytest.approx(theirs.token, abs=1e-5)
        for token in few.step():
            found[token.request].append(token.token)
        if not few.has_work():
            break
    assert found == expected
    state = few.state()
    assert state.num_preempted > 0
    assert state.num_free_blocks == state.num_blocks
    with pytest.raises(RequestError, match="do not fit a cache of 16 tokens") as refused:
        make_engine(model, num_blocks=4).embed(text, "mean")
    assert refused.value.reason == "too_long"


def test_what_cannot_be_served_is_refused_in_words() -> None:
    engine = make_engine(tiny_model("llama"), num_blocks=4, max_running=1, max_waiting=1, vocab_size=59)
    wrong = {
        "is empty": ("invalid", Request("x", (), 1)),
        "generates nothing": ("invalid", Request("x", (1,), 0)),
        "token 59 does not exist": ("invalid", Request("x", (59,), 1)),  # the model has 61, the tokenizer 59
        "exceeds the context of 32": ("too_long", Request("x", (1,) * 33, 1)),
        "do not fit a cache of 16 tokens": ("too_long", Request("x", (1,) * 10, 9)),
        "temperature = nan is not a number between": ("invalid", Request("x", (1,), 1, Sampling(temperature=math.nan))),
        "logit_bias of token 60": ("invalid", Request("x", (1,), 1, Sampling(logit_bias={60: 1.0}))),
        "top_k = 1000": ("invalid", Request("x", (1,), 1, Sampling(top_k=10**400))),
    }
    for message, (reason, request) in wrong.items():
        with pytest.raises(RequestError, match=message) as found:
            engine.add(request)
        assert found.value.reason == reason
    engine.add(Request("x", (1,), 3))
    with pytest.raises(RequestError, match="a request named 'x' is in the engine"):
        engine.add(Request("x", (1,), 3))
    engine.add(Request("y", (1,), 3))
    with pytest.raises(RequestError, match="2 requests run or wait already") as full:
        engine.add(Request("z", (1,), 3))
    assert full.value.reason == "queue_full"
    idle = make_engine(tiny_model("llama"), max_waiting=0)
    assert len(serve_all(idle, [Request("x", (1,), 3)])["x"]) == 3
    with pytest.raises(ConfigError, match="cannot serve a Linear"):
        make_engine(nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="block_size = 0"):
        EngineOptions(block_size=0)


def test_an_engine_says_how_many_tokens_its_step_has() -> None:
    engine = make_engine(tiny_model("llama"), token_budget=8)
    engine.add(Request("x", tuple(range(1, 21)), 3, GREEDY))
    sizes = []
    while engine.has_work():
        engine.step()
        sizes.append(engine.num_step_tokens)
    assert sizes == [8, 8, 8, 4, 1]  # of this step and the one before, whose tokens may be waited for


def test_swapped_pages_are_read_again_and_not_after_new_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [Request(str(i), (7 * i + 1, 5, 3, i), 9, GREEDY) for i in range(4)]
    sizes = {"num_blocks": 6, "max_running": 4, "swap_blocks": 20, "prefix_cache": False}

    def tokens(model: nn.Module) -> dict[str, list[int]]:
        return {one.name: likeliest(model, one.tokens, 9) for one in requests}

    def served() -> tuple[Engine, dict[str, list[int]]]:
        engine = make_engine(tiny_model("llama"), **sizes)
        return engine, tokens_of(serve_all(engine, requests))

    engine, found = served()
    assert engine.state().num_swapped == engine.state().num_preempted > 0
    assert found == tokens(tiny_model("llama"))
    engine = make_engine(tiny_model("llama"), **sizes)
    for one in requests:
        engine.add(one)
    while not engine.state().num_swapped:
        engine.step()
    done = {name: len(active.tokens) for name, active in engine._all.items()}
    engine.replace_weights(tiny_model("llama", seed=1))
    rest: dict[str, list[int]] = {}
    before = {name: active.tokens[:] for name, active in engine._all.items()}
    while engine.has_work():
        for token in engine.step():
            rest.setdefault(token.request, []).append(token.token)
    for name, length in done.items():
        assert rest[name] == likeliest(tiny_model("llama", seed=1), before[name], 13 - length)
    load = HostPages.load

    def corrupt(self: HostPages, owner: ActiveRequest, blocks: Sequence[int], first: int) -> None:
        load(self, owner, blocks, first)
        for page in self._pages:
            page[list(blocks)] = 0

    monkeypatch.setattr(HostPages, "load", corrupt)
    assert served()[1] != tokens(tiny_model("llama"))  # the pages are really used


def test_blocks_that_an_older_chunk_does_not_fill_are_not_shared() -> None:
    """With several stages, a request may come again while a chunk of before is between stages."""
    engine = make_engine(tiny_model("llama"), token_budget=4)
    engine.add(Request("x", tuple(range(12)), 2, GREEDY))
    (first,) = engine._scheduler.schedule()
    older = first._replace(start=4, end=8)
    engine._read(LaunchedStep([older], None, None))
    policy = engine._scheduler.policy
    assert isinstance(policy, PagedBlocks)
    assert len(policy._known) == 1  # of the chunk that was begun since
