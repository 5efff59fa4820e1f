"""Generates text with a trained model, in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Literal

import numpy as np
from torch import nn

from weft.data.tokenizer import Tokenizer, encode_text
from weft.errors import ConfigError
from weft.serve.attention.formats import CacheFormat, block_size_of
from weft.serve.engine import Engine
from weft.serve.head.graph_head import GraphHead
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.scheduling.speculation import EarlyLayers
from weft.serve.spec import EngineOptions


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    context: int = 1024,
    seconds: float = math.inf,
    speculate: Literal["ngram"] | EarlyLayers | nn.Module | None = None,
    cache: CacheFormat | None = None,
    head: GraphHead | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> str:
    """Generate up to `num_tokens` tokens after the prompt, a text or its tokens. Stops earlier at the end of the
    document, at one of `stop_tokens` or after `seconds`.
    Temperature 0 takes the most likely token. When the context is full, generation goes on after its second half.
    `speculate` drafts tokens (`serve/scheduling/speculation.py`); the text is the same. `cache` is how keys and values
    are kept, `head` how the likeliest tokens are found.
    """
    deadline = time.monotonic() + seconds
    options = EngineOptions(
        max_running=1,
        context_length=context,
        vocab_size=tokenizer.vocab_size,
        speculate=speculate,
        cache=cache,
        head=head,
        block_size=block_size_of(cache or CacheFormat()),
    )
    engine = Engine(model, options)
    tokens = encode_text(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    tokens = tokens or [tokenizer.end]
    start, context_tokens, number = len(tokens), tokens[-engine.context_length :], 0
    while len(tokens) < start + num_tokens:
        sampling = Sampling(temperature=temperature, top_k=top_k or 0, seed=seed + (number << 32))
        left = start + num_tokens - len(tokens)
        try:
            engine.add(Request("text", tuple(context_tokens), left, sampling, stop_tokens | {tokenizer.end}))
        except RequestError as error:  # here the caller gave all that a request has, so it is a wrong setting
            raise ConfigError(str(error)) from None
        while engine.has_work():
            for generated in engine.step():
                generated.require_number()
                if generated.finish == "stop":
                    return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))
                tokens.append(generated.token)
            if time.monotonic() > deadline:
                return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))
        context_tokens, number = tokens[-max(1, engine.context_length // 2) :], number + 1
    return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))
