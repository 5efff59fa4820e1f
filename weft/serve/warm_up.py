"""What a server computes before it is ready, so that no request waits for work that is done once.

On a GPU, kernels are compiled when a step first has a new shape, libraries choose theirs, and CUDA graphs are captured.
So all graphs are captured, and made-up requests run through the engine: alone in several lengths, together in as many
as decodes have sizes, and with each way of sampling. Triton keeps compiled kernels on disk, so later starts take less
time. A CPU compiles nothing: one request brings the weights into memory. Streamed weights get one, too, as each of
their steps takes long.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch

from weft.serve.calibration.bars import Bar, no_bar
from weft.serve.engine import Engine
from weft.serve.model.step_graphs import graph_sizes
from weft.serve.scheduling.grammar import ANY_OBJECT
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.spec import EngineOptions

NUM_TOKENS = 3  # of an answer: one after the prompt, and two decodes
LENGTHS = (1, 2, 8, 16, 17, 33, 64, 100, 128, 255, 481, 1000, 2048, 3000)
GREEDY = Sampling(temperature=0.0)
WAYS = (
    Sampling(),
    Sampling(top_k=20, top_p=0.9, min_p=0.01),
    Sampling(repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1, logit_bias={0: -1.0}),
    Sampling(top_p=0.9, repetition_penalty=1.1),  # filters of float32
    Sampling(num_logprobs=2),
)


def warm_up(engine: Engine, options: EngineOptions, bar: Bar = no_bar) -> float:
    """Compute what first requests would wait for, by an engine that has these options. Returns the seconds it took.

    What the engine has computed leaves no trace: neither cached prompts nor counts.
    """
    began = time.monotonic()
    jobs = _jobs(engine, options)
    with bar("warming up") as progress:
        for number, job in enumerate(jobs, 1):
            job()
            progress(number, len(jobs))
    engine.reset()
    return time.monotonic() - began


def _jobs(engine: Engine, options: EngineOptions) -> list[Callable[[], object]]:
    longest = min(engine.context_length, engine.num_slots - 1) - NUM_TOKENS
    if longest < 1:  # a cache of a few tokens
        return []
    make = _MadeUp(engine.vocab_size, longest)
    if torch.device(options.device or "cpu").type == "cpu" or options.stream_weights:
        return [partial(_serve, engine, make.requests(1, 8))]
    rounds = [make.requests(1, length) for length in LENGTHS if length <= longest]
    rounds += [make.requests(number, 2) for number in graph_sizes(options.num_rows)]
    rounds.append(make.requests(options.num_rows, 8))  # more prompts than a graph of a step takes
    rounds += [make.requests(number, 8, way) for way in WAYS for number in (1, 3)]
    rounds.append([replace(one, sampling=way) for one, way in zip(make.requests(len(WAYS), 8), WAYS, strict=True)])
    repeated = make.requests(1, 2)[0]  # drafts by lookup
    rounds.append([replace(repeated, tokens=(repeated.tokens * 4)[:longest])])
    rounds += [[replace(one, adapter=name) for one in make.requests(2, 8)] for name in options.adapters]
    if options.grammars is not None:
        rounds.append([replace(one, json_schema=ANY_OBJECT) for one in make.requests(1, 8)])
    text = make.requests(1, 8)[0]
    jobs: list[Callable[[], object]] = [*engine.captures(), *(partial(_serve, engine, one) for one in rounds)]
    return [*jobs, partial(engine.embed, text.tokens, "mean"), partial(engine.score, text)]


class _MadeUp:
    """Makes requests of random tokens, the same ones each time, of at most `longest` tokens."""

    def __init__(self, vocab_size: int, longest: int) -> None:
        self._rng, self._vocab_size, self._longest = random.Random(0), vocab_size, longest

    def requests(self, number: int, length: int, sampling: Sampling = GREEDY) -> list[Request]:
        """Returns `number` requests of `length` tokens each."""
        length = min(length, self._longest)
        return [
            Request(
                f"warm-up {index}", tuple(self._rng.choices(range(self._vocab_size), k=length)), NUM_TOKENS, sampling
            )
            for index in range(number)
        ]


def _serve(engine: Engine, requests: list[Request]) -> None:
    """Run requests to their end, as many at once as the engine holds."""
    waiting: Iterator[Request] = iter(requests)
    for one in waiting:
        engine.add(one)
    while engine.has_work():
        engine.step()
