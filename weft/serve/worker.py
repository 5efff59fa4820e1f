"""A thread that runs the engine's steps, and gives clients of an event loop their tokens.

The engine is used by this thread alone. What the event loop wants of it (add, cancel, other weights) is done between
two steps, in the order in which it was asked. A text that is embedded or scored takes as long as a step, or several:
one of them is computed between two steps, so that answers go on.
"""

from __future__ import annotations

import asyncio
import statistics
import threading
import time
import traceback
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from weft.errors import WeftError
from weft.serve.scheduling.request import EngineState, GeneratedToken, Request, RequestError, TokenLogprobs

T = TypeVar("T")
IDLE_SECONDS = 2.0
STALL_SECONDS = 20.0  # a step lasts at least so long before it counts as one that does not end
FIRST_TOKEN_SECONDS = 1.0  # for each token of a step before one was measured
Pool = Literal["mean", "last"]  # of the last layer's hidden states


class StepEngine(Protocol):
    """What the worker and the server use of an engine. To cancel a request that it does not hold does nothing.

    `idle` is called every `IDLE_SECONDS` while there is no work, so that lost ranks are found. `num_step_tokens` are
    the tokens that the step which is computed now, or was last, has at most.
    """

    context_length: int
    vocab_size: int
    num_step_tokens: int

    def add(self, request: Request) -> None: ...
    def cancel(self, name: str) -> None: ...
    def step(self) -> list[GeneratedToken]: ...
    def has_work(self) -> bool: ...
    def state(self) -> EngineState: ...
    def replace_weights(self, model: nn.Module) -> None: ...
    def replace_weights_from(self, checkpoint: Path) -> None: ...
    def embed(self, tokens: Sequence[int], pool: Pool) -> torch.Tensor: ...
    def score(self, request: Request) -> list[TokenLogprobs]: ...
    def idle(self) -> None: ...


class UnavailableError(WeftError):
    """The server takes no requests: it stops, or its engine failed. Another server may take them."""


class StepLimit:
    """How long a step may take before it counts as one that does not end: ten times the median of what the last steps
    lead one to expect. A step takes no longer than one of more tokens, and for each token no longer than one of fewer.
    So each step that was measured bounds the time of any other, and a long prompt on a slow CPU may take as long as it
    needs.
    """

    def __init__(self) -> None:
        self._measured: deque[tuple[int, float]] = deque(maxlen=20)  # tokens and seconds

    def add(self, num_tokens: int, seconds: float) -> None:
        """Add the time of a step of `num_tokens` tokens."""
        self._measured.append((max(1, num_tokens), seconds))

    def seconds(self, num_tokens: int) -> float:
        """Returns the limit of a step of `num_tokens` tokens."""
        if not self._measured:
            return 5 * STALL_SECONDS + num_tokens * FIRST_TOKEN_SECONDS
        bounds = [time * max(1.0, num_tokens / one) for one, time in self._measured]
        return max(STALL_SECONDS, 10 * statistics.median(bounds))


class TokenStream:
    """The tokens of requests that were submitted together, in the order in which they are generated.

    It holds at most as many tokens as its requests may generate, so a client that reads slowly holds no more memory.
    """

    def __init__(self, worker: EngineWorker, names: Iterable[str]) -> None:
        self._worker, self._open = worker, set(names)
        self._queue: asyncio.Queue[GeneratedToken | Exception] = asyncio.Queue()

    async def tokens(self) -> AsyncIterator[GeneratedToken]:
        """Yields tokens until every request has ended or was cancelled. Raises UnavailableError if the engine ends."""
        while self._open:
            item = await self._queue.get()
            if isinstance(item, Exception):
                raise item
            if item.request in self._open:
                if item.finish is not None:
                    self._open.remove(item.request)
                yield item

    def put(self, item: GeneratedToken | Exception) -> None:
        """Give the stream a token, or the error that ends it."""
        self._queue.put_nowait(item)

    def cancel(self, name: str | None = None) -> None:
        """Cancel one request, or all that have not ended: before the engine's next step."""
        names = self._open & {name} if name is not None else set(self._open)
        self._open -= names
        self._worker.forget(names)


class EngineWorker:
    """Runs an engine in a thread. All methods are for the event loop in which `start` was called."""

    def __init__(self, engine: StepEngine, max_requests: int = 512) -> None:
        self._engine, self._max_requests = engine, max_requests
        self._loop: asyncio.AbstractEventLoop | None = None
        self._streams: dict[str, TokenStream] = {}  # by the name of a request that has not ended
        self._inbox: deque[_EngineCall[Any]] = deque()
        self._texts: deque[_EngineCall[Any]] = deque()  # to be embedded or scored
        self._num_held = 0  # places of clients whose texts are computed
        self._wake = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._refusal: str | None = None  # why no client is taken any more; those that were taken are answered
        self._ended: str | None = None  # why nobody is answered any more
        self.num_clients = 0  # that are being answered
        self.has_failed = False
        self.failure = ""  # the engine's error, for operators
        self.state = engine.state()  # after the last step
        self._limit = StepLimit()
        self._busy_since: float | None = None  # when the step or text began that is computed now
        self._num_text_tokens = 0  # of the text that is computed now; 0: a step is

    def start(self) -> None:
        """Start the thread. Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    @property
    def num_requests(self) -> int:
        """Requests that have not ended, and places that are held while texts are embedded or scored."""
        return len(self._streams) + self._num_held

    @property
    def stalled_seconds(self) -> float | None:
        """How long the step or text that is computed now lasts, if that is far longer than steps do; else None."""
        since = self._busy_since
        seconds = 0.0 if since is None else time.monotonic() - since
        return seconds if seconds > self._limit.seconds(self._num_busy_tokens) else None

    @property
    def _num_busy_tokens(self) -> int:
        return self._num_text_tokens or self._engine.num_step_tokens

    @contextmanager
    def _busy(self, is_measured: bool, num_text_tokens: int = 0) -> Iterator[None]:
        """Notes in which time the engine computes a text of `num_text_tokens` tokens, or a step. If `is_measured`, its
        seconds bound those of other steps.
        """
        self._num_text_tokens = num_text_tokens
        self._busy_since = began = time.monotonic()
        yield
        if is_measured:
            self._limit.add(self._num_busy_tokens, time.monotonic() - began)
        self._busy_since = None

    @property
    def refusal(self) -> UnavailableError | None:
        """Why no client is taken any more; None if clients are taken."""
        why = self._ended or self._refusal
        return None if why is None else UnavailableError(why)

    @contextmanager
    def client(self) -> Iterator[None]:
        """Counts a client while it is answered, by any number of requests. Raises UnavailableError if no client is
        taken any more.
        """
        if (refusal := self.refusal) is not None:
            raise refusal
        self.num_clients += 1
        try:
            yield
        finally:
            self.num_clients -= 1

    def require_room(self, number: int) -> None:
        """Raise RequestError unless `number` more requests can be held now, or UnavailableError if none ever can."""
        if self._ended is not None:
            raise UnavailableError(self._ended)
        if number > self._max_requests:
            raise RequestError(
                "invalid",
                f"{number} answers at once are more than the {self._max_requests} requests that this server holds; "
                f"ask for fewer",
            )
        if self.num_requests + number > self._max_requests:
            raise RequestError(
                "queue_full",
                f"the server holds {self.num_requests} requests of at most {self._max_requests} and was asked for "
                f"{number} more; try again later",
            )

    @contextmanager
    def holding(self, number: int) -> Iterator[None]:
        """Holds places of requests, so that a client whose texts are computed one after the other is refused at once or
        not at all. Raises RequestError or UnavailableError.
        """
        self.require_room(number)
        self._num_held += number
        try:
            yield
        finally:
            self._num_held -= number

    async def submit(self, requests: Sequence[Request]) -> TokenStream:
        """Give requests to the engine: all or, if it refuses one, none. Raises RequestError or UnavailableError."""
        self.require_room(len(requests))
        stream = TokenStream(self, [request.name for request in requests])
        self._streams.update({request.name: stream for request in requests})
        try:
            await self.call(lambda: self._add(requests))
        except BaseException:  # also if the client is gone while it waits
            stream.cancel()
            raise
        return stream

    async def call(self, function: Callable[[], T]) -> T:
        """Returns what a function returns that uses the engine. It is called between two steps, and let go of."""
        return await asyncio.wrap_future(self._ask(self._inbox, function))

    async def embed(self, tokens: Sequence[int], pool: Pool) -> NDArray[np.float32]:
        """Returns the embedding of a text; the client holds a place. Raises RequestError or UnavailableError."""
        return await self._text(lambda: self._engine.embed(tokens, pool).float().cpu().numpy(), len(tokens))

    async def score(self, request: Request) -> list[TokenLogprobs]:
        """Returns the log-probabilities of a prompt, as `embed` does."""
        return await self._text(lambda: self._engine.score(request), len(request.tokens))

    async def _text(self, function: Callable[[], T], num_tokens: int) -> T:
        """Returns what a function returns that computes a text of `num_tokens` tokens."""
        self.require_room(0)
        return await asyncio.wrap_future(self._ask(self._texts, function, num_tokens))

    async def replace_weights(self, weights: nn.Module | Path) -> None:
        """Compute with the weights of another model of the same shape, or of a checkpoint, from the next step on."""
        if isinstance(weights, nn.Module):
            await self.call(lambda: self._engine.replace_weights(weights))
        else:
            await self.call(lambda: self._engine.replace_weights_from(weights))

    def forget(self, names: Iterable[str]) -> None:
        """Cancel requests before the next step."""
        for name in [name for name in names if self._streams.pop(name, None) is not None]:
            self._put(self._inbox, _EngineCall(partial(self._engine.cancel, name)))

    def refuse(self, why: str) -> None:
        """Take no more clients. Those that are being answered go on."""
        self._refusal = why

    def close(self) -> None:
        """End the thread after its step. Streams that are open raise UnavailableError."""
        self._ended = self._ended or "the server stops; ask another one, or this one when it is back"
        self._end_streams()
        with self._wake:
            self._closed = True
            self._wake.notify()

    def join(self, timeout_seconds: float) -> bool:
        """Wait for the thread's end after `close`. Returns whether it has ended."""
        self._thread.join(timeout_seconds)
        return not self._thread.is_alive()

    def _ask(self, queue: deque[_EngineCall[Any]], function: Callable[[], T], num_tokens: int = 0) -> Future[T]:
        """Put a function into a queue. Returns what it will return."""
        result: Future[T] = Future()
        self._put(queue, _EngineCall(function, result, num_tokens))
        return result

    def _put(self, queue: deque[_EngineCall[Any]], action: _EngineCall[Any]) -> None:
        with self._wake:
            if not self._closed:
                queue.append(action)
                self._wake.notify()
                return
        action.fail(UnavailableError("the engine was stopped"))

    def _add(self, requests: Sequence[Request]) -> None:
        """Add requests to the engine. Those added before one that is refused are cancelled by `submit`."""
        for request in requests:
            self._engine.add(request)

    def _deliver(self, tokens: list[GeneratedToken], state: EngineState) -> None:
        """In the event loop: give each stream its tokens."""
        self.state = state
        for token in tokens:
            stream = self._streams.get(token.request)
            if stream is not None:
                stream.put(token)
                if token.finish is not None:
                    del self._streams[token.request]

    def _fail(self, error: BaseException) -> None:
        """In the event loop: the engine failed, and so do all requests."""
        self.has_failed = True
        self.failure = f"the engine failed: {type(error).__name__}: {error}"
        self._ended = "the engine failed, and with it this answer; the server's log says why. Ask again in some seconds"
        self._end_streams()

    def _end_streams(self) -> None:
        assert self._ended is not None
        for stream in set(self._streams.values()):
            stream.put(UnavailableError(self._ended))
        self._streams.clear()

    def _run(self) -> None:
        """Run the thread: do what was asked for, one text, then a step, as long as there is work."""
        try:
            while self._wait():
                for _ in range(len(self._inbox)):  # what is asked for meanwhile waits for the next step
                    self._inbox.popleft().run()
                while self._texts:
                    text = self._texts.popleft()
                    with self._busy(is_measured=False, num_text_tokens=text.num_tokens):
                        if text.run():
                            break  # else nobody waits for it any more
                tokens = []
                with self._busy(is_measured=self._engine.has_work()):
                    if self._engine.has_work():
                        tokens = self._engine.step()
                    else:
                        self._engine.idle()
                self._tell(partial(self._deliver, tokens, self._engine.state()))
        except BaseException as error:  # a panic of a library in Rust is no Exception
            traceback.print_exc()
            self._tell(partial(self._fail, error))
        with self._wake:
            self._closed = True
        for action in (*self._inbox, *self._texts):
            action.fail(UnavailableError("the engine was stopped"))

    def _wait(self) -> bool:
        """Waits until there is work, for `IDLE_SECONDS` at most. Returns False when the thread is to end."""
        with self._wake:
            if not self._closed and not self._inbox and not self._texts and not self._engine.has_work():
                self._wake.wait(IDLE_SECONDS)
            return not self._closed

    def _tell(self, action: Callable[[], None]) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(action)
        except RuntimeError:  # the event loop has ended, and with it all clients
            with self._wake:
                self._closed = True


class _EngineCall(Generic[T]):
    """Something to do with the engine. With a `result`, somebody waits for it; without, it must not fail. `num_tokens`
    are those of the text that it computes.
    """

    def __init__(self, function: Callable[[], T], result: Future[T] | None = None, num_tokens: int = 0) -> None:
        self._function, self._result, self.num_tokens = function, result, num_tokens

    def run(self) -> bool:
        """Do it. Returns False if it was not done, as nobody waits for it any more."""
        if self._result is None:
            self._function()
        elif not self._result.set_running_or_notify_cancel():
            return False
        else:
            try:
                self._result.set_result(self._function())
            except BaseException as error:
                # A panic of a library in Rust is no Exception, as which clients are told.
                told = error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
                self._result.set_exception(told)
                del self, told  # which the error holds, by this frame, and which hold the error
        return True

    def fail(self, error: Exception) -> None:
        if self._result is not None and self._result.set_running_or_notify_cancel():
            self._result.set_exception(error)
