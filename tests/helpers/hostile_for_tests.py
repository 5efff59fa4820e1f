"""A client that sends a server what no honest one would: random schemas, stops, bodies, slow connections."""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

ANSWER_SECONDS = 120.0
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
ENDLESS = {"allOf": [{"type": "string", "pattern": f".*a.{{{number}}}b"} for number in range(20)]}
REGEXES = ["(.*a){40}b", "(?:(?:a?){30}){30}", "(", "\x00/é"]
GRAMMARS = [
    'start: start start start | "a" |',
    'start: ("a"?)~50 "b"',
    'start: "a"~1..1000000',
    "start: start",
    "start: @no",
    "start: <|end|>",
    "start: /.*/ start /.*/ | /x/",
    f"start: {'(' * 5000}",
    "%import common.INT\nstart: INT",
    "",
]


class HostileClient:
    """Sends requests of random kinds to a server, one after the other. `statuses` counts the answers."""

    def __init__(self, address: tuple[str, int], seed: int) -> None:
        self._address, self._rng = address, random.Random(seed)
        self._idle: list[socket.socket] = []
        self.statuses: dict[int, int] = {}

    def close(self) -> None:
        """Close the connections that were left open."""
        for one in self._idle:
            one.close()

    def send_one(self) -> None:
        """Send one request, or a part of one."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (20, self._schema),
            (15, self._stops),
            (20, self._numbers),
            (10, self._large),
            (10, self._chat),
            (15, self._connection),
            (10, self._leave),
        ]
        self._rng.choices([send for _, send in kinds], [weight for weight, _ in kinds])[0]()

    def random_schema(self, depth: int = 0) -> Any:
        """A schema of random keys, some of them costly to compile and some that nothing matches."""
        rng, again = self._rng, lambda: self.random_schema(depth + 1)
        if depth == 0 and rng.random() < 0.04:
            return rng.choice([ENDLESS, {"type": "integer", "multipleOf": rng.randrange(10**7, 10**8)}])
        leaves: list[Any] = [
            {},
            {"$ref": "#"},
            {"type": rng.choice(["string", "integer", "number", "boolean", "null", "nope"])},
            {"type": "string", "pattern": rng.choice(["(a|b)*c", ".*a.{9}b", "(", "a{1000}", "^$", "\\\\p{L}+"])},
            {"type": "string", "minLength": rng.choice([0, 5, 10**9]), "maxLength": rng.choice([0, 10, 10**6])},
            {"enum": [rng.choice(["é", "😀", "\\u0000", 1, None, [1]]) for _ in range(rng.choice([0, 1, 300]))]},
            {"type": "integer", "minimum": rng.randint(-9, 9), "multipleOf": rng.choice([0, 7, 1e-9, 10007])},
            {"const": "x" * rng.choice([1, 1000, 20000])},
        ]
        if depth > 3 or rng.random() < 0.4:
            return rng.choice(leaves)
        return rng.choice(
            [
                {"type": "object", "properties": {f"k{n}": again() for n in range(3)}, "required": ["k0"]},
                {"type": "array", "items": again(), "minItems": rng.choice([0, 1, 10**9])},
                {rng.choice(["anyOf", "allOf", "oneOf"]): [again() for _ in range(rng.randint(0, 4))]},
                {"$defs": {"a": again(), "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/b"},
            ]
        )

    def _schema(self) -> None:
        schema = {"type": "json_schema", "json_schema": {"schema": self.random_schema()}}
        forms: list[dict[str, Any]] = [{"response_format": schema}] * 3
        forms.append({"structured_outputs": {"regex": self._rng.choice(REGEXES)}})
        forms.append({"structured_outputs": {"choice": ["\ud800", "é"] * self._rng.choice([0, 1, 600])}})
        forms.append({"structured_outputs": {"grammar": self._rng.choice(GRAMMARS), "json": None}})
        self._post(COMPLETIONS, {"prompt": "x", "max_tokens": 20, **self._rng.choice(forms)})

    def _stops(self) -> None:
        letter = self._rng.choice("aé😀")
        stops = [letter * self._rng.choice([1, 9, 900, 1001]) + "b" for _ in range(self._rng.choice([1, 16, 17]))]
        bias = {str(byte): 100 for byte in letter.encode()}
        self._post(
            COMPLETIONS,
            {"prompt": letter, "stop": stops, "logit_bias": bias, "max_tokens": 60, "stream": self._rng.random() < 0.5},
        )

    def _numbers(self) -> None:
        values = [-1, 0, 1, 2**63, 1e308, -1e39, 0.5, "1", None, True, [], {}, "\ud800"]
        keys = ["temperature", "top_p", "top_k", "min_p", "n", "seed", "max_tokens", "logprobs", "repetition_penalty"]
        keys += ["best_of", "structured_outputs"]
        keys += ["stop", "stream", "logit_bias", "stop_token_ids", "echo", "model", "frequency_penalty", "no_such_key"]
        body = {key: self._rng.choice(values) for key in self._rng.sample(keys, 2)}
        self._post(COMPLETIONS, {"prompt": self._rng.choice(["x", [1, 2], [[1]], ["a", "b"]]), "max_tokens": 4, **body})

    def _large(self) -> None:
        entry = self._rng.choice(["1", "[1]", '"a"', "{}", "[[[[1]]]]", '{"role":"u","content":""}'])
        key = self._rng.choice(["prompt", "stop", "stop_token_ids", "metadata", "tools", "response_format"])
        size = self._rng.choice([1000, 100_000, 1_000_000, 4_000_000])
        self._send(COMPLETIONS, f'{{"{key}": [{",".join([entry] * (size // (len(entry) + 1)))}]}}'.encode())

    def _chat(self) -> None:
        messages = [{"role": self._rng.choice(["user", "a" * 99]), "content": "é" * 9}] * self._rng.choice([1, 9, 999])
        tools = [{"type": "function", "function": {"name": "f", "parameters": self.random_schema()}}]
        self._post(CHATS, {"messages": messages, "tools": tools * self._rng.choice([0, 1, 99]), "max_tokens": 4})

    def _connection(self) -> None:
        """A connection that stays open: silent, with a part of a head or a body, or answers that nobody reads."""
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n"
        body = b"Content-Type: application/json\r\nContent-Length: 99\r\n\r\n{"
        asked = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * 50
        self._idle.append(socket.create_connection(self._address, ANSWER_SECONDS))
        with suppress(OSError):
            self._idle[-1].sendall(self._rng.choice([b"", head, head + body, asked, b"\x16\x03\x01\r\n\r\n"]))
        if len(self._idle) > 100:
            self._idle.pop(0).close()

    def _leave(self) -> None:
        """A request whose client does not wait for the answer."""
        schema = {"type": "json_schema", "json_schema": {"schema": self.random_schema()}}
        body = json.dumps({"prompt": "x", "max_tokens": 99, "response_format": schema, "stream": True}).encode()
        with suppress(OSError), socket.create_connection(self._address, ANSWER_SECONDS) as client:
            client.sendall(_request(COMPLETIONS, body))

    def _post(self, path: str, body: Any) -> None:
        self._send(path, json.dumps(body).encode())

    def _send(self, path: str, body: bytes) -> None:
        with suppress(ConnectionError), socket.create_connection(self._address, ANSWER_SECONDS) as client:
            client.sendall(_request(path, body))
            answer = client.recv(1 << 16)
            status = int(answer.split()[1]) if answer else 0
            self.statuses[status] = self.statuses.get(status, 0) + 1
            while client.recv(1 << 16):
                pass


def _request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
