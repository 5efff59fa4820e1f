"""Replicas of a model behind one front: the axis `data`.

The front has its own replica and gives each request to the replica that holds the fewest. In a step of the front, every
replica that has work computes one step. If replicas read weights from host memory together, the others take part in the
reading. Requests and tokens travel as JSON between the scheduling ranks.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.comm import Axis, receive, send
from weft.errors import ConfigError, WeftError
from weft.serve.engine import Engine
from weft.serve.scheduling.request import EngineState, GeneratedToken, Request, RequestError, Sampling, TokenLogprobs
from weft.serve.worker import IDLE_SECONDS

FRONT = 0  # its index on the axis


class ReplicaFront:
    """An engine over all replicas: `engine` is this rank's own, the others are reached over the axis. `clock` gives
    seconds: ranks without work are told so now and then while others work.
    """

    def __init__(
        self, engine: Engine, axis: Axis, max_requests: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.vocab_size = engine.vocab_size
        self.context_length, self.num_slots = engine.context_length, engine.num_slots  # the same of all replicas
        self._engine, self._axis, self._max_requests = engine, axis, max_requests
        self._others = [index for index in range(axis.degree) if index != FRONT]
        self._owner: dict[str, int] = {}  # the replica of each request
        self._added: dict[int, list[Request]] = {index: [] for index in self._others}  # to be told
        self._cancelled: dict[int, list[str]] = {index: [] for index in self._others}
        self._states = {index: replace(engine.state()) for index in self._others}
        self.num_step_tokens = 1
        self._clock, self._told_at = clock, clock()  # when ranks without work were told so

    def add(self, request: Request) -> None:
        self._engine.check(request)
        if request.name in self._owner:
            raise RequestError("invalid", f"a request named {request.name!r} is in the engine; give another name")
        num_requests = [list(self._owner.values()).count(index) for index in range(self._axis.degree)]
        least = num_requests.index(min(num_requests))
        if num_requests[least] >= self._max_requests:
            raise RequestError(
                "queue_full", f"every replica holds {self._max_requests} requests, the most allowed; try again later"
            )
        self._owner[request.name] = least
        if least == FRONT:
            self._engine.add(request)
        else:
            self._added[least].append(request)

    def cancel(self, name: str) -> None:
        index = self._owner.pop(name, None)
        if index == FRONT:
            self._engine.cancel(name)
        elif index is not None:
            told_later = self._added[index]
            self._added[index] = [one for one in told_later if one.name != name]
            if len(self._added[index]) == len(told_later):
                self._cancelled[index].append(name)

    def has_work(self) -> bool:
        return bool(self._owner) or any(self._cancelled.values()) or self._engine.has_work()

    def step(self) -> list[GeneratedToken]:
        owners, together = set(self._owner.values()), self._engine.reads_together
        busy = [one for one in self._others if together or one in owners or self._cancelled[one]]
        for index in busy:
            order = {"add": [_request_table(one) for one in self._added[index]], "cancel": self._cancelled[index]}
            self._added[index], self._cancelled[index] = [], []
            _send(order, self._axis, index)
        now = self._clock()
        if is_due := now - self._told_at >= IDLE_SECONDS:
            self._told_at = now
        quiet = [one for one in self._others if is_due and one not in busy]
        for index in quiet:
            _send({"idle": True}, self._axis, index)
        self.num_step_tokens = self._engine.token_budget  # until other replicas say how many they had
        tokens_of_all = list[GeneratedToken]()
        if together or self._engine.has_work():
            tokens_of_all = self._engine.step()
        elif is_due:
            self._engine.idle()
        most = self._engine.num_step_tokens
        for index in [*busy, *quiet]:
            answer = _receive(self._axis, index)
            most = max(most, answer["num_step_tokens"])
            self._states[index] = EngineState(**answer["state"])
            tokens_of_all += [_token(table) for table in answer["tokens"]]
        self.num_step_tokens = most
        tokens = [one for one in tokens_of_all if one.request in self._owner]
        for one in tokens:
            if one.finish is not None:
                del self._owner[one.request]
        return tokens

    def state(self) -> EngineState:
        """Returns the sums over replicas."""
        states = [self._engine.state(), *self._states.values()]
        sums = {one.name: sum(getattr(state, one.name) for state in states) for one in fields(EngineState)}
        return EngineState(**{**sums, "block_size": states[0].block_size})

    def idle(self) -> None:
        """Let all ranks of all replicas find out if one is gone."""
        self._ask({"idle": True})
        self._engine.idle()
        self._answers()

    def reset(self) -> None:
        """Forget what this rank's replica computed, and counts of it. There must be no requests."""
        self._engine.reset()

    def close(self) -> None:
        self._ask({"stop": True})
        self._engine.close()

    def embed(self, tokens: Sequence[int], pool: Literal["mean", "last"]) -> Tensor:
        self._engine.check_text(tokens)
        with self._others_passing(len(tokens)):
            return self._engine.embed(tokens, pool)

    def score(self, request: Request) -> list[TokenLogprobs]:
        self._engine.check(replace(request, max_tokens=1))
        with self._others_passing(len(request.tokens)):
            return self._engine.score(request)

    @contextmanager
    def _others_passing(self, num_tokens: int) -> Iterator[None]:
        """A context in which the front computes a text alone, while other replicas take part in reading weights."""
        if not self._engine.reads_together:
            yield
            return
        self._ask({"pass": -(-num_tokens // self._engine.token_budget)})
        try:
            yield
        finally:
            self._answers()

    def replace_weights(self, model: nn.Module) -> None:
        raise ConfigError("replicas read newer weights themselves; use replace_weights_from")

    def replace_weights_from(self, checkpoint: Path) -> None:
        """Let all ranks of all replicas take newer weights, or none."""
        self._ask({"weights": str(checkpoint)})
        try:
            self._engine.replace_weights_from(checkpoint)
        finally:
            self._answers()

    def _ask(self, order: dict[str, Any]) -> None:
        for index in self._others:
            _send(order, self._axis, index)

    def _answers(self) -> None:
        for index in self._others:
            _receive(self._axis, index)


def serve_replica(engine: Engine, axis: Axis) -> None:
    """Run a replica that is not the front's, until the front tells it to end."""
    while True:
        order = _receive(axis, FRONT)
        if "stop" in order:
            engine.close()
            return
        tokens: list[GeneratedToken] = []
        if "weights" in order:
            with suppress(WeftError):  # the front has the same error, and says it
                engine.replace_weights_from(Path(order["weights"]))
        elif "idle" in order:
            engine.idle()
        elif "pass" in order:
            for _ in range(order["pass"]):
                engine.pass_by()
        else:
            for name in order["cancel"]:  # first: what is added may need their places
                engine.cancel(name)
            for table in order["add"]:
                engine.add(_request(table))
            tokens = engine.step() if engine.reads_together or engine.has_work() else []
        size = {"num_step_tokens": engine.num_step_tokens}
        _send({"tokens": [asdict(one) for one in tokens], "state": asdict(engine.state())} | size, axis, FRONT)


def _send(value: dict[str, Any], axis: Axis, peer: int) -> None:
    text = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    size = torch.tensor([len(text)])
    for tensor in (size, text):
        send(tensor, axis, peer, "requests and tokens").wait()


def _receive(axis: Axis, peer: int) -> dict[str, Any]:
    size = torch.empty(1, dtype=torch.int64)
    receive(size, axis, peer, "requests and tokens").wait()
    text = torch.empty(int(size), dtype=torch.uint8)
    receive(text, axis, peer, "requests and tokens").wait()
    value: dict[str, Any] = json.loads(text.numpy().tobytes())
    return value


def _request_table(request: Request) -> dict[str, Any]:
    return {**asdict(request), "stop_tokens": sorted(request.stop_tokens)}


def _request(table: dict[str, Any]) -> Request:
    sampling = dict(table["sampling"])
    sampling["logit_bias"] = {int(token): value for token, value in sampling["logit_bias"].items()}
    given = {**table, "sampling": Sampling(**sampling), "tokens": tuple(table["tokens"])}
    return Request(**{**given, "stop_tokens": frozenset(table["stop_tokens"])})


def _token(table: dict[str, Any]) -> GeneratedToken:
    logprobs_table = table["logprobs"]
    logprobs = (
        None
        if logprobs_table is None
        else TokenLogprobs(logprobs_table["token"], tuple(map(tuple, logprobs_table["likeliest"])))
    )
    return GeneratedToken(**{**table, "logprobs": logprobs})
