"""Chooses the next token of each request from its logits, on the device and without waiting for it.

In this order: penalties and bias change the logits; tokens that a schema does not allow are left out; temperature
divides the logits; top_k, top_p and min_p leave tokens out; one of the rest is drawn. A draw is the argmax of logits
plus Gumbel noise, which is a hash of the request's seed, the position and the token. So equal seeds give equal tokens
whatever else is in the batch, and in whatever row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from weft.serve.attention.batch import to_device
from weft.serve.scheduling.grammar import allowed_tokens
from weft.serve.scheduling.request import Sampling, TokenLogprobs
from weft.serve.scheduling.scheduler import ActiveRequest

LEAST_SHARE = 1e-30  # a top_p below it leaves the likeliest token, too
LEAST_TEMPERATURE = 1e-6  # below it, logits divided by it would be infinite; the likeliest token is drawn anyway
_ROUNDS = ((16, 0x7FEB352D), (15, 0x846CA68B - (1 << 32)))  # shifts and factors of a 32-bit hash (lowbias32)


class SampledTokens(NamedTuple):
    """Tokens [requests], -1 for logits that are NaN; log-probabilities if some request asks for them."""

    tokens: Tensor
    logprobs: Tensor | None = None  # [requests]
    likeliest: Tensor | None = None  # [requests, k] tokens
    likeliest_logprobs: Tensor | None = None

    def logprobs_of(self, index: int, number: int) -> TokenLogprobs:
        """Return the log-probabilities of a request's token and of the `number` likeliest ones."""
        assert self.logprobs is not None
        assert self.likeliest is not None
        assert self.likeliest_logprobs is not None
        tokens, values = self.likeliest[index, :number].tolist(), self.likeliest_logprobs[index, :number].tolist()
        return TokenLogprobs(float(self.logprobs[index]), tuple(zip(tokens, values, strict=True)))


@dataclass(frozen=True)
class SamplingRows:
    """The settings of the requests of a batch as tensors on the device, and what they make necessary."""

    members: list[ActiveRequest]
    own_rows: list[int]  # of the members when this was made
    rows: Tensor  # [requests] the sampler's rows
    temperature: Tensor  # [requests, 1], as are the following
    top_k: Tensor
    top_p: Tensor
    log_min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    keys: Tensor  # [requests, 2] int32, of the noise
    bias: tuple[Tensor, Tensor, Tensor] | None  # requests, tokens, values
    is_random: bool
    has_filter: bool
    has_penalty: bool
    num_logprobs: int | None


class Sampler:
    """Samples for up to `num_rows` requests; each has a row in its tables while it runs."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size, self.device = vocab_size, device
        self.last = torch.zeros(num_rows, dtype=torch.int64, device=device)  # the last token of each row
        self._num_rows = num_rows
        self._counts: Tensor | None = None  # [rows, vocab] how often a token was generated
        self._in_prompt: Tensor | None = None  # [rows, vocab]
        self._settings: SamplingRows | None = None

    def admit(self, active: ActiveRequest) -> None:
        """Prepare the row of a request that begins to run, or runs again."""
        self._settings = None
        if not _has_penalty(active.request.sampling):
            return
        if self._counts is None or self._in_prompt is None:
            shape = (self._num_rows, self.vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self._in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        tokens = to_device(torch.tensor(active.tokens), self.device)
        prompt, generated = tokens.tensor_split([len(active.request.tokens)])
        self._in_prompt[active.row] = False
        self._in_prompt[active.row, prompt] = True
        self._counts[active.row] = 0
        self._counts[active.row].index_add_(0, generated, torch.ones_like(generated, dtype=torch.int32))

    def sample(self, logits: Tensor, members: list[ActiveRequest], positions: Tensor) -> SampledTokens:
        """Return one token for each row of logits [requests, at least vocab]. `positions` are those of the tokens
        before.

        All tokens before must have been read if a member has a matcher.
        """
        settings = self._settings
        if settings is None or settings.members != members or settings.own_rows != [one.row for one in members]:
            settings = self._settings = _settings_of(members, self.vocab_size, self.device)
        logits = logits[:, : self.vocab_size]
        logprobs = None if settings.num_logprobs is None else logits.float().log_softmax(-1)
        if settings.has_penalty or settings.bias is not None:
            logits = self._penalised(logits.float(), settings)
        matchers = [active.matcher for active in members]
        if any(matcher is not None for matcher in matchers):
            allowed = to_device(allowed_tokens(matchers, self.vocab_size), self.device)
            logits = logits.masked_fill(~allowed, -torch.inf)
        tokens = likeliest(logits)
        if settings.is_random:
            if settings.has_filter:
                drawn = filtered_draw(logits, settings, positions)
            else:
                drawn = draw(logits, settings.temperature, settings.keys, positions)
            tokens = torch.where((settings.temperature[:, 0] > 0) & (tokens >= 0), drawn, tokens)
        self.last[settings.rows] = tokens.clamp(min=0)  # after NaN any token: the next step may be launched before
        if settings.has_penalty and self._counts is not None:
            self._counts[settings.rows, tokens] += 1
        if logprobs is None:
            return SampledTokens(tokens)
        own = logprobs.gather(1, tokens.clamp(min=0)[:, None])[:, 0]
        values, indices = logprobs.topk(min(settings.num_logprobs or 0, self.vocab_size))
        return SampledTokens(tokens, own, indices, values)

    def _penalised(self, logits: Tensor, settings: SamplingRows) -> Tensor:
        """Changed copies of the logits, with penalties and bias."""
        if settings.has_penalty and self._counts is not None and self._in_prompt is not None:
            counts = self._counts[settings.rows]
            seen = self._in_prompt[settings.rows] | (counts > 0)
            repeated = torch.where(logits > 0, logits / settings.repetition, logits * settings.repetition)
            # Rows of requests without penalties may have counts of others; their factors change nothing.
            logits = torch.where(seen, repeated, logits)
            logits = logits - settings.frequency * counts - settings.presence * (counts > 0)
        if settings.bias is not None:
            rows, tokens, values = settings.bias
            logits = logits.clone().index_put_((rows, tokens), values, accumulate=True)
        return logits


def _has_penalty(sampling: Sampling) -> bool:
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != (1.0, 0.0, 0.0)


def likeliest(logits: Tensor) -> Tensor:
    """Return the first token of each row that has the highest logit; -1 if a logit is NaN."""
    if logits.is_cuda:
        from weft.serve.head.sampling_kernel import likeliest_by_kernel

        return likeliest_by_kernel(logits)
    best, tokens = logits.max(-1)
    return torch.where(best.isnan(), -1, tokens)


def _settings_of(members: list[ActiveRequest], vocab_size: int, device: torch.device) -> SamplingRows:
    wanted = [active.request.sampling for active in members]
    numbers = [
        (
            max(one.temperature, LEAST_TEMPERATURE) if one.temperature else 0.0,
            one.top_k or vocab_size,
            max(one.top_p, LEAST_SHARE),
            max(one.min_p, 1e-38),
            one.repetition_penalty,
            one.presence_penalty,
            one.frequency_penalty,
        )
        for one in wanted
    ]
    floats = torch.tensor(numbers, dtype=torch.float32)
    floats[:, 3].log_()
    floats = to_device(floats, device)
    integers = to_device(torch.tensor([(active.row, *_key(active.seed)) for active in members]), device)
    bias = [(row, token, value) for row, one in enumerate(wanted) for token, value in one.logit_bias.items()]
    asked = [one.num_logprobs for one in wanted if one.num_logprobs is not None]
    return SamplingRows(
        list(members),
        [active.row for active in members],
        integers[:, 0],
        temperature=floats[:, 0:1],
        top_k=floats[:, 1:2],
        top_p=floats[:, 2:3],
        log_min_p=floats[:, 3:4],
        repetition=floats[:, 4:5],
        presence=floats[:, 5:6],
        frequency=floats[:, 6:7],
        keys=integers[:, 1:].to(torch.int32).contiguous(),
        bias=_bias_tensors(bias, device) if bias else None,
        is_random=any(one.temperature > 0 for one in wanted),
        has_filter=any(one.temperature > 0 and (one.top_k or one.top_p < 1 or one.min_p) for one in wanted),
        has_penalty=any(map(_has_penalty, wanted)),
        num_logprobs=max(asked) if asked else None,
    )


def _bias_tensors(bias: Sequence[tuple[int, int, float]], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    rows, tokens, values = zip(*bias, strict=True)
    places = to_device(torch.tensor([rows, tokens]), device)
    return places[0], places[1], to_device(torch.tensor(values, dtype=torch.float32), device)


def _key(seed: int) -> tuple[int, int]:
    """Return two signed 32-bit numbers from a seed of any size."""
    low, high = seed & 0xFFFFFFFF, (seed >> 32) & 0xFFFFFFFF
    return low - (low >> 31 << 32), high - (high >> 31 << 32)


def draw(logits: Tensor, temperature: Tensor, keys: Tensor, positions: Tensor) -> Tensor:
    """Return a random token of each row [requests, tokens], by its temperature [requests, 1]."""
    if logits.is_cuda:
        from weft.serve.head.sampling_kernel import draw_by_kernel

        return draw_by_kernel(logits, temperature, keys, positions)
    scaled = logits.float() / torch.where(temperature > 0, temperature, 1.0)
    return (scaled + gumbel_noise(keys, positions, logits.shape[1])).argmax(-1)


def filtered_draw(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Return a random token of each row, by its temperature and among those that its filters leave."""
    if logits.is_cuda:
        from weft.serve.head.sampling_kernel import draw_by_kernel, filter_by_kernel

        left = filter_by_kernel(logits, settings.temperature, settings.top_k, settings.top_p, settings.log_min_p)
        return draw_by_kernel(logits, settings.temperature, settings.keys, positions, left)
    return filtered_draw_by_sorting(logits.float(), settings, positions)


def filtered_draw_by_sorting(logits: Tensor, settings: SamplingRows, positions: Tensor) -> Tensor:
    """Equals `filtered_draw`, by plain functions that sort the logits."""
    scaled = logits / torch.where(settings.temperature > 0, settings.temperature, 1.0)
    noise = gumbel_noise(settings.keys, positions, logits.shape[1])
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    left_out = torch.arange(logits.shape[1], device=logits.device) >= settings.top_k
    ordered = ordered.masked_fill(left_out, -torch.inf)
    probabilities = ordered.softmax(-1)
    before = probabilities.cumsum(-1) - probabilities  # the probability of likelier tokens
    left_out = (before >= settings.top_p) | (ordered < ordered[:, :1] + settings.log_min_p)
    left_out[:, 0] = False
    chosen = (ordered.masked_fill(left_out, -torch.inf) + noise.gather(1, order)).argmax(-1, keepdim=True)
    return order.gather(1, chosen)[:, 0]


def gumbel_noise(keys: Tensor, positions: Tensor, size: int) -> Tensor:
    """Return Gumbel noise [requests, size] (float32): a function of key [requests, 2] (int32), position and token."""
    place = positions.to(torch.int32)
    first, second = _mix(place ^ _mix(keys[:, 0])), _mix(place + _mix(keys[:, 1] ^ 0x5BD1E995))
    tokens = torch.arange(size, dtype=torch.int32, device=keys.device)
    bits = _mix(_mix(tokens ^ first[:, None]) + second[:, None]) & 0x7FFFFFFF
    # An exponential variable whose small values are exact: these win.
    exponential = -torch.log1p(-(bits.to(torch.float32) + 0.5) * 2.0**-31)
    return -exponential.log()


def _mix(bits: Tensor) -> Tensor:
    """Return a hash of 32-bit numbers; products wrap around."""
    for shift, factor in _ROUNDS:
        bits = (bits ^ _shifted(bits, shift)) * factor
    return bits ^ _shifted(bits, 16)


def _shifted(bits: Tensor, shift: int) -> Tensor:
    """Logical shift to the right."""
    return (bits >> shift) & ((1 << (32 - shift)) - 1)
