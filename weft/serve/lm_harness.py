"""Lets lm-evaluation-harness (`pip install lm_eval`) measure a run, a checkpoint or a Hugging Face folder.

    python -m weft.serve.lm_harness --model weft --model_args folder=runs/chat --tasks arc_easy

is the harness's own command with the model `weft` added. From Python:

    lm_eval.simple_evaluate(model=HarnessModel("runs/chat"), tasks=["arc_easy"])
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.serve.engine import Engine
from weft.serve.loading import load_model
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.spec import EngineOptions, ServingSpec
from weft.serve.text import StopTable, TextStream

try:
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise ConfigError(f"lm-evaluation-harness is not installed ({error}); run: pip install lm_eval") from None

MAX_TOKENS = 256  # generated if a task does not say how many
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed")  # as in `Sampling`
_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens")
_ONE_BEAM = ("num_beams", "num_return_sequences")


class HarnessRequest(Protocol):
    """What the harness asks: `args` are (context, continuation), (text,) or (context, options)."""

    @property
    def args(self) -> tuple[Any, ...]: ...


@register_model("weft")
class HarnessModel(LM):
    """A model in this process, as lm-evaluation-harness drives it.

    Before each text come the tokens that the tokenizer puts there, once: what a chat template wrote may have them.
    `begin`, a text (for example "<|begin_of_text|>"), takes their place; "" is none.
    """

    def __init__(
        self,
        folder: str | Path,
        tokenizer: str | None = None,
        begin: str | None = None,
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
    ) -> None:
        """`device` is a GPU if there is one. `max_batch_size` is not used: the harness gives it to every model."""
        super().__init__()
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ConfigError(f"batch_size = {batch_size} is not a number above 0; give one, e.g. 8")
        self.device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        loaded = load_model(Path(folder), ServingSpec(tokenizer=tokenizer), self.device, print)
        self._model, self._tokenizer, self._batch = loaded.model, loaded.tokenizer, int(batch_size)
        self._served = loaded.served(str(folder), None, loaded.context_length, loaded.tokenizer.vocab_size)
        self._context_length = loaded.context_length
        own = self._tokenizer.before if self._tokenizer.adds_special_tokens else ()
        self._begin = own if begin is None else self._encode(begin)

    def loglikelihood(self, requests: Sequence[HarnessRequest]) -> list[tuple[float, bool]]:
        """Returns of each continuation its log-likelihood after its context, and whether it is the greedy one."""
        texts = [self._pair(*one.args) for one in requests]
        return [(found.log_likelihood, found.is_greedy) for found in score(self._model, texts, self._batch)]

    def loglikelihood_rolling(self, requests: Sequence[HarnessRequest]) -> list[float]:
        """Returns the log-likelihood of each whole text. Long ones are scored in windows with the longest context."""
        totals = []
        for one in requests:
            texts = windows(self._encode(one.args[0]), self._start(), self._context_length)
            totals.append(sum(found.log_likelihood for found in score(self._model, texts, self._batch)))
        return totals

    def generate_until(self, requests: Sequence[HarnessRequest]) -> list[str]:
        """Returns the continuation of each prompt, up to its first stop string or the end of the document."""
        options = EngineOptions(
            max_running=self._batch,
            max_waiting=max(1, len(requests)),
            context_length=self._context_length,
            vocab_size=self._tokenizer.vocab_size,
        )
        engine = Engine(self._model, options)
        texts = [""] * len(requests)
        streams: dict[str, TextStream] = {}
        for number, one in enumerate(requests):
            request, stops = self._request(str(number), *one.args)
            streams[request.name] = TextStream(self._tokenizer, request, StopTable(stops))
            engine.add(request)
        while engine.has_work():
            for token in engine.step():
                if token.request not in streams:
                    continue
                token.require_number()
                chunk = streams[token.request].push(token)
                texts[int(token.request)] += chunk.text
                if chunk.finish is not None:
                    del streams[token.request]
                    engine.cancel(token.request)
        return texts

    def apply_chat_template(self, chat_history: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """Returns a conversation as the model's chat template writes it."""
        if self._served.template is None:
            raise ConfigError(f"{self._served.name} has no chat template; leave --apply_chat_template out")
        return self._served.template.render(chat_history, asks=add_generation_prompt)

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        """Returns the source of the model's chat template, which the harness stores with its results."""
        return self._served.template.source if chat_template and self._served.template is not None else None

    @property
    def tokenizer_name(self) -> str:
        """A name under which the harness caches what depends on the tokenizer."""
        return f"{self._tokenizer.fingerprint} {self._begin}"

    def _encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text).tolist())

    def _start(self) -> tuple[int, ...]:
        """Returns what comes before a text without context: the begin token, else the token that ends a document."""
        return self._begin or (self._tokenizer.end,)

    def _begun(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the tokens of a text after the begin token, which they may have already."""
        return tokens if tokens[: len(self._begin)] == self._begin else (*self._begin, *tokens)

    def _pair(self, context: str, continuation: str) -> ScoredText:
        """Returns the tokens of both, cut at the left to the model's context. Spaces between them belong to the
        continuation, because tokenizers join a space with the word after it.
        """
        stripped = context.rstrip()
        before = self._encode(stripped)
        whole = self._encode(context + continuation)
        num_scored = len(whole) - len(before)
        if num_scored < 1:
            raise ConfigError(f"the continuation {continuation!r} adds no token to its context; leave it out")
        if num_scored > self._context_length:
            raise ConfigError(
                f"a continuation of {num_scored} tokens exceeds the context of {self._context_length}; choose another "
                f"task, or a model with a longer context"
            )
        begun = self._begun(whole) if before else (*self._start(), *whole)
        return ScoredText(begun[-self._context_length - 1 :], num_scored)

    def _request(self, name: str, context: str, options: Mapping[str, Any]) -> tuple[Request, list[str]]:
        """Returns a request of the engine and its stop strings, from the options of a task."""
        known = {*_SAMPLING, *_LENGTHS, *_ONE_BEAM, "until", "do_sample"}
        unknown = [key for key in options if key not in known] + [
            f"{key} = {options[key]}" for key in _ONE_BEAM if options.get(key, 1) != 1
        ]
        if unknown:
            raise ConfigError(f"the task's generation option {', '.join(unknown)} is unknown to weft; leave it out")
        until = options.get("until") or []
        sampling = {key: options[key] for key in _SAMPLING if options.get(key) is not None}
        if not options.get("do_sample", sampling.get("temperature", 0) > 0):
            sampling["temperature"] = 0.0
        sampling.setdefault("seed", int(name))  # the same results in every run, and not the same for all requests
        asked = next((int(options[key]) for key in _LENGTHS if options.get(key) is not None), MAX_TOKENS)
        num_tokens = max(1, min(asked, self._context_length - 1))
        tokens = (self._begun(self._encode(context)) or self._start())[num_tokens - self._context_length :]
        request = Request(name, tokens, num_tokens, Sampling(**sampling), self._served.end_tokens)
        stops = [until] if isinstance(until, str) else until
        return request, [stop for stop in stops if stop]


class ScoredText(NamedTuple):
    """Tokens, of which the last `num_scored` are scored, each given all tokens before it."""

    tokens: tuple[int, ...]
    num_scored: int


class Score(NamedTuple):
    """The sum of log-probabilities, and whether greedy decoding would give the same tokens."""

    log_likelihood: float
    is_greedy: bool


@torch.inference_mode()
def score(model: nn.Module, texts: Sequence[ScoredText], batch: int) -> list[Score]:
    """Returns the score of each text, `batch` texts at a time. A text has one token more than the model is given."""
    order = sorted(range(len(texts)), key=lambda number: -len(texts[number].tokens))  # texts of like length together
    scores: dict[int, Score] = {}
    for begin in range(0, len(order), batch):
        members = order[begin : begin + batch]
        logits = model(_padded([texts[number].tokens[:-1] for number in members], model))
        for row, number in enumerate(members):
            scores[number] = _score(logits[row], texts[number])
    return [scores[number] for number in range(len(texts))]


def windows(tokens: Sequence[int], begin: Sequence[int], context_length: int) -> list[ScoredText]:
    """Returns texts that together score each token of a document once, after the tokens `begin`.

    Each window has as many tokens of context as fit.
    """
    everything = (*begin, *tokens)
    texts: list[ScoredText] = []
    start = len(begin)
    while start < len(everything):
        end = min(context_length + (start if texts else 1), len(everything))
        texts.append(ScoredText(everything[max(0, end - context_length - 1) : end], end - start))
        start = end
    return texts


def _padded(rows: Sequence[Sequence[int]], model: nn.Module) -> Tensor:
    """Returns rows of tokens as one tensor. Padding follows the tokens, so causal attention does not see it."""
    padded = torch.zeros(len(rows), max(len(row) for row in rows), dtype=torch.int64)
    for number, row in enumerate(rows):
        padded[number, : len(row)] = torch.tensor(row)
    return padded.to(next(model.parameters()).device)


def _score(logits: Tensor, text: ScoredText) -> Score:
    end = len(text.tokens) - 1
    scored = logits[end - text.num_scored : end]
    targets = torch.tensor(text.tokens[-text.num_scored :], device=scored.device)
    wide = scored.to(torch.promote_types(scored.dtype, torch.float32)).log_softmax(-1)
    total = wide.gather(1, targets[:, None]).sum().item()
    if math.isnan(total):
        raise NumbersError("the model gives NaN for a text; its weights may be NaN; take an older checkpoint")
    return Score(total, bool((scored.argmax(-1) == targets).all()))


if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()
