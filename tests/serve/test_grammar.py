"""Answers that match a JSON schema: alone and in a batch, greedy and drawn, whole and streamed; bad schemas refused."""

from __future__ import annotations

import json
import random
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from serve_for_tests import LIMIT_SECONDS, Served, serving, wait_for
from serving_for_tests import GREEDY, MODELS, likeliest, serve_all, tokens_of
from torch import nn

from weft.data.tokenizer import ByteTokenizer, FileTokenizer
from weft.models import build, initialise
from weft.serve.engine import Engine, EngineOptions
from weft.serve.head import sampling as sampling_module
from weft.serve.scheduling import grammar, schema_trial
from weft.serve.scheduling.grammar import ANY_OBJECT, MAX_SCHEMA_BYTES, AnswerMatcher, Grammars
from weft.serve.scheduling.request import GeneratedToken, Request, RequestError, Sampling

pytestmark = pytest.mark.processes
BYTES = ByteTokenizer()
SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "kind": {"enum": ["cat", "dög"]}},
    "required": ["ok", "kind"],
    "additionalProperties": False,
}
CHOICES = {(ok, kind) for ok in (True, False) for kind in ("cat", "dög")}
CONTEXT = 128
NO_BLANKS = {ord(blank): -100.0 for blank in " \n\t"}  # answers are short


@pytest.fixture(scope="module")
def model() -> nn.Module:
    """A model of bytes whose likeliest tokens are no JSON."""
    made = build(replace(MODELS["llama"], vocab_size=257, max_position_embeddings=CONTEXT))
    initialise(made, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return made.eval()


def make_engine(model: nn.Module, **options: Any) -> Engine:
    grammars = Grammars(BYTES, [BYTES.end])
    return Engine(model, EngineOptions(**{"block_size": 4, "num_blocks": 300, "grammars": grammars, **options}))


def read(generated: list[GeneratedToken]) -> dict[str, Any]:
    assert generated[-1].finish == "stop"
    found: dict[str, Any] = json.loads(BYTES.decode(torch.tensor([one.token for one in generated]).numpy()))
    return found


def mixed_requests() -> list[Request]:
    """Greedy and drawn requests with a schema, and requests without one."""
    schema, rng, requests = json.dumps(SCHEMA), random.Random(0), list[Request]()
    for number in range(6):
        prompt = tuple(rng.randrange(256) for _ in range(rng.randint(1, 9)))
        drawn = {"seed": number, "top_k": 40 * (number % 2), "top_p": 0.9} if number % 3 else {"temperature": 0}
        sampling = Sampling(**drawn, logit_bias=NO_BLANKS)  # type: ignore[arg-type]
        requests.append(Request(f"json {number}", prompt, 60, sampling, frozenset([256]), json_schema=schema))
        requests.append(Request(f"text {number}", prompt, 15, GREEDY))
    return requests


def test_answers_match_their_schema_alone_and_batched_and_others_are_not_changed(model: nn.Module) -> None:
    requests = mixed_requests()
    plain = make_engine(model, overlap=False)
    results = serve_all(plain, requests)
    for one in requests:
        if one.json_schema is None:
            assert [token.token for token in results[one.name]] == likeliest(model, one.tokens, 15)
        else:
            answer = read(results[one.name])
            assert set(answer) == {"ok", "kind"}
            assert (answer["ok"], answer["kind"]) in CHOICES
    scarce = make_engine(model, overlap=True, num_blocks=20, token_budget=7, max_running=6)
    assert tokens_of(serve_all(scarce, requests, every=2)) == tokens_of(results)
    assert scarce.state().num_preempted > 0
    assert scarce.state().num_free_blocks == 20
    assert tokens_of(serve_all(make_engine(model), requests[:1])) == {"json 0": tokens_of(results)["json 0"]}
    free = serve_all(make_engine(model), [replace(requests[0], json_schema=None)])["json 0"]
    assert [one.token for one in free] != tokens_of(results)["json 0"]  # the schema makes the difference


def test_blanks_do_not_fill_an_answer(model: nn.Module) -> None:
    """A model that likes blanks and line breaks best still answers: at most one blank stands between two parts."""
    likes_blanks = Sampling(temperature=0, logit_bias=dict.fromkeys(map(ord, " \n\t"), 100.0))
    request = Request("x", (1, 2), 60, likes_blanks, frozenset([256]), json_schema=json.dumps(SCHEMA))
    generated = serve_all(make_engine(model), [request])["x"]
    assert set(read(generated)) == {"ok", "kind"}
    text = bytes(one.token for one in generated if one.token < 256).decode()
    assert "  " not in text
    assert "\n" not in text
    assert text.count(" ") > 3


def test_without_masks_an_answer_that_leaves_its_schema_is_noticed(
    model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampling_module, "allowed_tokens", lambda matchers, size: torch.ones(len(matchers), size) > 0)
    request = mixed_requests()[0]
    found = serve_all(make_engine(model, overlap=True), [request])[request.name]
    assert [one.finish for one in found] == ["stuck"]


def test_a_bias_and_penalties_do_not_break_the_schema(model: nn.Module) -> None:
    sampling = Sampling(temperature=0, logit_bias={ord("x"): 1e9, ord("{"): -1e9, **NO_BLANKS}, repetition_penalty=5.0)
    request = Request("x", (1, 2), 60, sampling, frozenset([256]), json_schema=json.dumps(SCHEMA))
    answer = read(serve_all(make_engine(model), [request])["x"])
    assert (answer["ok"], answer["kind"]) in CHOICES


BAD_SCHEMAS = [
    ({"type": "json_schema"}, "needs {'json_schema':"),
    ({"type": "json_schema", "json_schema": {"schema": [1]}}, "needs {'json_schema':"),
    ({"type": "xml"}, "'response_format' of type 'xml' is not known"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "nope"}}}, "the schema cannot be used: Invalid type"),
    ({"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1/x"}}}, "the schema cannot be used"),
    ({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": "(("}}}, "regex parse error"),
    (
        {"type": "json_schema", "json_schema": {"schema": {"const": "x" * MAX_SCHEMA_BYTES}}},
        f"at most {MAX_SCHEMA_BYTES} are taken",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": {"maximum": 10**400}}},  # a number that no float holds
        "the schema cannot be used: number out of range at line 1",
    ),
    (
        {"type": "json_schema", "json_schema": {"schema": json.loads('{"not":' * 200 + "{}" + "}" * 200)}},
        "the schema cannot be used: recursion limit exceeded",
    ),
]


@pytest.fixture(scope="module")
def served(model: nn.Module) -> Iterator[Served]:
    with serving(make_engine(model)) as found:
        yield found


def test_over_http_whole_streamed_and_with_stop(served: Served) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS)
    schema = {"type": "json_schema", "json_schema": {"name": "animal", "schema": SCHEMA, "strict": True}}
    messages = [{"role": "user", "content": "x"}]
    options: dict[str, Any] = {"model": "tiny", "messages": messages, "response_format": schema, "seed": 3}
    options["logit_bias"] = {str(blank): bias for blank, bias in NO_BLANKS.items()}
    whole = client.chat.completions.create(**options, n=2)
    texts = [choice.message.content for choice in whole.choices]
    assert [choice.finish_reason for choice in whole.choices] == ["stop", "stop"]
    assert all((json.loads(text)["ok"], json.loads(text)["kind"]) in CHOICES for text in texts)
    chunks = list(client.chat.completions.create(**options, stream=True))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == texts[0]
    assert chunks[-1].choices[0].finish_reason == "stop"
    stopped = client.chat.completions.create(**options, stop='"kind"')
    assert stopped.choices[0].message.content == texts[0].split('"kind"')[0]
    options["response_format"] = {"type": "json_object"}
    options["logit_bias"] |= {str(ord("}")): 100}
    found = client.chat.completions.create(**options, max_tokens=9)
    assert json.loads(found.choices[0].message.content) == {}


FORMS: list[tuple[dict[str, Any], str]] = [  # and a regular expression that whole answers match
    ({"regex": r"[a-c]{3}/\d{2}é"}, r"[a-c]{3}/\d{2}é"),
    ({"choice": ['say "yes"\n', "né/in"]}, r'say "yes"\n|né/in'),
    ({"grammar": 'start: "a" start | WORD\nWORD: /[x-z]{2}/'}, "a*[x-z]{2}"),
    ({"json": {"enum": ["cat", "dog"]}}, '"(cat|dog)"'),
]


@pytest.mark.parametrize(("form", "pattern"), FORMS, ids=lambda value: next(iter(value), ""))
def test_answers_match_a_regex_choices_or_a_grammar(served: Served, form: dict[str, Any], pattern: str) -> None:
    bias = {str(ord("a")): -1}  # so that answers end
    body = {"prompt": "x", "structured_outputs": form, "n": 4, "seed": 1, "max_tokens": 60, "logit_bias": bias}
    answer = served.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]
    free = served.post("/v1/completions", {**body, "structured_outputs": None}).json()["choices"]
    assert not any(re.fullmatch(pattern, choice["text"]) for choice in free)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ({"regex": "a("}, "the grammar cannot be used: at 1(8): invalid regex"),
        ({"grammar": "start: x"}, 'unknown name: "x"'),
        ({"grammar": 'stat: "a"'}, "the grammar cannot be used: no start rule found"),
        ({"grammar": "start: start"}, "the grammar cannot be used: "),
        ({"regex": "a", "choice": ["b"]}, "an answer matches one form; give one key of 'structured_outputs', or a"),
        ({"choice": ["a"] * 1025}, "'structured_outputs.choice' has 1025 entries; at most 1024 are taken"),
        ({"choice": []}, "'choice' of 'structured_outputs' is empty; give at least one text"),
        ({"choice": [1]}, "structured_outputs.choice"),
        ({"regex": "x" * MAX_SCHEMA_BYTES}, f"at most {MAX_SCHEMA_BYTES} are taken"),
        ({"pattern": "a"}, "unknown key 'structured_outputs.pattern'"),
    ],
)
def test_forms_that_cannot_be_used_are_refused_in_words(served: Served, form: dict[str, Any], words: str) -> None:
    refused = served.post("/v1/completions", {"prompt": "x", "structured_outputs": form})
    assert refused.status_code == 400, refused.text
    assert words in refused.json()["error"]["message"]


def test_bad_schemas_are_refused_in_words(served: Served) -> None:
    for wanted, words in BAD_SCHEMAS:
        refused = served.post("/v1/completions", {"prompt": "x", "response_format": wanted})
        assert refused.status_code == 400, wanted
        assert words in refused.json()["error"]["message"], wanted
    endless = (
        b'{"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1e999}}}}'
    )
    refused = served.post("/v1/completions", content=endless, headers={"Content-Type": "application/json"})
    assert (refused.status_code, refused.json()["error"]["message"][:25]) == (400, "the schema cannot be used")
    with pytest.raises(RequestError, match="knows no tokenizer"):
        Engine(build(MODELS["llama"]), EngineOptions(num_blocks=4)).add(Request("x", (1,), 1, json_schema=ANY_OBJECT))


def test_a_tokenizer_file_and_an_answer_that_cannot_go_on(tmp_path: Path) -> None:
    """A vocabulary of few letters: it can write `{"cat":true}`, but not the key of another schema."""
    from tokenizers import Tokenizer, decoders, models

    words = [*'{}":catrue', "</s>"]
    backend = Tokenizer(models.BPE({word: index for index, word in enumerate(words)}, []))
    backend.add_special_tokens(["</s>"])
    path = tmp_path / "tokenizer.json"
    backend.save(str(path))
    with pytest.raises(RequestError, match=r"cannot be held to a schema: .* can't determine decoder type"):
        Grammars(FileTokenizer(path, None), []).matcher(ANY_OBJECT)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(path))
    grammars = Grammars(FileTokenizer(path, None), [])
    made = build(replace(MODELS["llama"], vocab_size=len(words)))
    initialise(made, 0)
    engine = Engine(made, EngineOptions(num_blocks=16, grammars=grammars))
    for key, finish in (("cat", "stop"), ("dog", "stuck")):
        schema = {"type": "object", "properties": {key: {"const": True}}, "required": [key]}
        schema["additionalProperties"] = False
        request = Request("x", (0,), 30, GREEDY, frozenset([len(words) - 1]), json_schema=json.dumps(schema))
        found = serve_all(engine, [request])["x"]
        assert found[-1].finish == finish
        if finish == "stop":
            assert "".join(words[one.token] for one in found) == '{"cat":true}'


ENDLESS = [  # to compile: by time, and by memory
    {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b"} for number in range(20)]},
    {"type": "integer", "multipleOf": 10**7 + 19},
]


def wanted(schema: Any) -> dict[str, Any]:
    """A completion that matches a schema."""
    return {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def test_schemas_that_take_for_ever_to_compile_are_refused_and_others_are_answered_meanwhile(model: nn.Module) -> None:
    with serving(make_engine(model)) as served, ThreadPoolExecutor(8) as pool:
        refused = [pool.submit(served.post, "/v1/completions", wanted(schema)) for schema in ENDLESS * 2]
        num_answered = 0
        while not all(one.done() for one in refused):
            assert served.post("/tokenize", {"prompt": "x"}).status_code == 200
            num_answered += 1
        assert num_answered > len(refused)
        for one in refused:
            assert one.result().status_code == 400
            assert "to compile" in one.result().json()["error"]["message"]
        assert served.post("/v1/completions", wanted(SCHEMA)).status_code == 200


def test_a_schema_is_left_when_its_client_is_gone(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    started = list[schema_trial.TrialProcess]()
    make = schema_trial.TrialProcess
    monkeypatch.setattr(schema_trial, "TrialProcess", lambda given: started.append(make(given)) or started[-1])
    with serving(make_engine(model)) as served:
        body = json.dumps(wanted(ENDLESS[0])).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n"
        with socket.create_connection(served.address) as client:
            client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
            wait_for(lambda: started)
        wait_for(lambda: started[0].has_ended)
        assert served.worker.num_requests == 0


NO_TEXT: list[dict[str, Any]] = [
    {"$ref": "#"},
    {"anyOf": [{"$ref": "#"}]},
    {"allOf": [{"$ref": "#"}]},
    {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
]


@pytest.mark.parametrize("schema", NO_TEXT)
def test_a_schema_that_no_text_matches_is_refused(served: Served, schema: dict[str, Any]) -> None:
    refused = served.post("/v1/completions", wanted(schema))
    assert refused.status_code == 400
    assert "the schema cannot be used: no text matches it" in refused.json()["error"]["message"]


class PanicException(BaseException):
    """As that of pyo3."""


def panic(*_: object) -> None:
    raise PanicException("index out of bounds")


@pytest.mark.parametrize("name", ["compute_bitmask", "consume_token"])
def test_a_panic_of_the_library_ends_one_answer_and_not_the_engine(
    served: Served, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    class Panicking:
        def __init__(self, matcher: Any) -> None:
            self._matcher = matcher

        def __getattr__(self, key: str) -> Any:
            return panic if key == name else getattr(self._matcher, key)

    with monkeypatch.context() as patched:
        patched.setattr(grammar.CompiledSchema, "matcher", lambda own: AnswerMatcher(Panicking(own._beginning)))  # type: ignore[arg-type]
        refused = served.post("/v1/completions", wanted(SCHEMA))
    assert (refused.status_code, refused.json()["error"]["message"][:26]) == (400, "the answer cannot go on: t")
    assert served.post("/v1/completions", wanted(SCHEMA)).status_code == 200


def test_a_panic_while_a_request_is_added_is_told_to_its_client(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "add", panic)
        assert served.post("/v1/completions", {"prompt": "x"}).status_code == 500
    assert served.post("/v1/completions", {"prompt": "x"}).status_code == 200


def test_schemas_are_kept_by_their_number_and_memory_and_while_somebody_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, trial = Grammars(BYTES, []), schema_trial.SchemaTrial()
    monkeypatch.setattr(grammar, "MAX_KEPT", 2)
    held = grammars.compile('{"const": 0}', trial)
    for number in (1, 2):
        grammars.compile(json.dumps({"const": number}), trial)
    assert grammars.known('{"const": 0}') is held
    del held
    assert [grammars.known(json.dumps({"const": number})) is not None for number in range(3)] == [False, True, True]
    first, second = (json.dumps({"type": "integer", "multipleOf": 60000 + number}) for number in (1, 2))
    num_bytes = grammars.compile(first, trial).num_bytes
    assert num_bytes > 10 << 20
    monkeypatch.setattr(grammar, "MAX_KEPT_BYTES", 3 * num_bytes // 2)
    grammars.compile(second, trial)
    assert [grammars.known(schema) is not None for schema in (first, second)] == [False, True]


@pytest.mark.processes
def test_a_schema_that_a_busy_machine_did_not_try_in_time_is_not_refused_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    grammars, trial = Grammars(BYTES, []), schema_trial.SchemaTrial()
    with monkeypatch.context() as patched:
        patched.setattr(schema_trial, "WALL_SECONDS", 0.0)
        patched.setattr(schema_trial, "START_SECONDS", 0.0)
        with pytest.raises(RequestError, match="busy; try again later") as busy:
            grammars.compile(json.dumps(SCHEMA), trial)
    assert busy.value.reason == "queue_full"
    assert grammars.compile(json.dumps(SCHEMA), trial)
