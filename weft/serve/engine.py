"""The serving engine: requests come and go at any time, and each step computes tokens of many of them at once.

    step() = schedule (which tokens) -> run (the model over pages) -> sample (on the device) -> read (on the host)

On a GPU, the tokens of a step are read after the next step is launched, so the host's work is hidden behind the
device's: a step returns the tokens of the one before it. Steps are replayed as CUDA graphs
(`serve/model/step_graphs.py`). One thread uses an engine.
"""

from __future__ import annotations

import os
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from weft.errors import NumbersError
from weft.serve.drafts.drafters import make_drafter
from weft.serve.follow_steps import read_together
from weft.serve.head.sampling import SampledTokens, Sampler
from weft.serve.model.model_part import ModelPart
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.ranks import RankMessage, ServingRanks
from weft.serve.model.step_graphs import DecodeGraphs, GraphRecorder, MixedGraphs, graph_sizes, mixed_sizes
from weft.serve.model.step_inputs import StepInputs, is_decode, runs_of, step_inputs
from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.grammar import AnswerMatcher
from weft.serve.scheduling.request import (
    EngineState,
    Finish,
    GeneratedToken,
    Request,
    RequestError,
    TokenLogprobs,
    check_request,
)
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk, Scheduler
from weft.serve.scheduling.speculation import DraftLengths, Speculation
from weft.serve.spec import EngineOptions
from weft.serve.text_passes import TextPasses

__all__ = ["Engine", "EngineOptions"]


@dataclass(frozen=True)
class BegunStep:
    """A step that other ranks compute already, this rank not yet. Without `inputs`, a CUDA graph computes it."""

    chunks: list[ScheduledChunk]  # all, those that sample first
    inputs: StepInputs | None


@dataclass
class LaunchedStep:
    """A step whose sampled tokens are on their way to the host."""

    chunks: list[ScheduledChunk]  # all, those that sample first
    sampled: SampledTokens | None  # of those that sample, in host memory once `is_copied`
    is_copied: torch.cuda.Event | None

    def wait(self) -> SampledTokens | None:
        if self.is_copied is not None:
            self.is_copied.synchronize()
        return self.sampled


class Engine:
    """Generates tokens for many requests with one model. See `serve/scheduling/request.py` for what it takes and gives.

    With `ranks`, several ranks compute the model: this one schedules and samples, and `model` is its part
    (`serve/parallel/rank_part.py`). The others run `follow_steps`. `load` reads this rank's part of a newer checkpoint.
    """

    def __init__(
        self,
        model: nn.Module,
        options: EngineOptions,
        ranks: ServingRanks | None = None,
        load: Callable[[Path], nn.Module] | None = None,
    ) -> None:
        self._part = part = ModelPart(model, options, ranks, load)
        self._ranks, self._options = ranks, options
        self._num_stages = 1 if ranks is None else ranks.num_stages
        self.context_length = part.context_length
        self.vocab_size = min(options.vocab_size or 1 << 62, part.paged.vocab_size)
        self.num_slots = part.layout.num_blocks * part.layout.block_size  # tokens that the cache holds
        has_prefixes = options.prefix_cache and part.paged.keeps_pages
        policy = PagedBlocks(part.layout.num_blocks, part.layout.block_size, has_prefixes)
        sizes = (options.token_budget, options.max_running, self._num_stages)
        pages = part.host_pages(options.swap_blocks)
        self._scheduler = Scheduler(policy, *sizes, pages, not part.layout.answers_are_decodes)
        self.token_budget = self._scheduler.token_budget
        self._texts = TextPasses(part, ranks, self._scheduler)
        self._sampler = Sampler(self._scheduler.max_running, self.vocab_size, part.device)
        # A replica of one rank is as an engine without ranks, unless it reads weights together with others.
        self._is_alone = ranks is None or (ranks.inputs.degree == 1 and ranks.readers is None)
        on_gpu = part.device.type == "cuda" and self._is_alone
        self._speculation: Speculation | None = None
        if options.speculate is not None:
            drafter = make_drafter(options, part, self._scheduler.max_running, self.vocab_size)
            self._speculation = Speculation(drafter, policy, self._scheduler.token_budget, DraftLengths())
        self._overlap = on_gpu if options.overlap is None else options.overlap and self._is_alone
        self._overlap = self._overlap and self._speculation is None  # drafts follow tokens that are read
        self._graphs: DecodeGraphs | None = None
        self._mixed_graphs: MixedGraphs | None = None
        has_graphs = options.graphs and not options.adapters and part.streamed is None
        if has_graphs and on_gpu and isinstance(part.paged, PagedModel) and part.paged.has_decode_kernel:
            paged, last, length, record = part.paged, self._sampler.last, self.context_length, GraphRecorder()
            rows = graph_sizes(self._scheduler.max_running)
            self._graphs = DecodeGraphs(paged, part.cache, last, part.layout, length, rows, record)
            if paged.has_prompt_kernel:
                tokens = mixed_sizes(self._scheduler.token_budget)
                self._mixed_graphs = MixedGraphs(paged, part.cache, last, part.layout, length, tokens, record)
        self._all: dict[str, ActiveRequest] = {}
        self._begun: deque[BegunStep] = deque()
        self._launched: LaunchedStep | None = None
        self._early: list[GeneratedToken] = []  # read outside of a step
        self._suspects: list[GeneratedToken] = []  # ends by NaN, until another text shows that weights are sound
        self._sound_token = 0  # a prompt with numbers began with it
        self._step_sizes: deque[int] = deque(maxlen=self._num_stages + 1)  # tokens of the steps under way
        self.num_step_tokens = 1  # that the step which is computed now, or was last, has at most
        self._num_arrived = 0
        self._num_generated = 0
        self._rng = random.Random(os.urandom(16))

    def add(self, request: Request) -> None:
        """Put a request into the queue. Raises RequestError if it cannot be served."""
        self.check(request)
        if request.name in self._all:
            raise RequestError("invalid", f"a request named {request.name!r} is in the engine; give another name")
        most = self._scheduler.max_running + self._options.max_waiting
        if len(self._all) >= most:
            raise RequestError("queue_full", f"{most} requests run or wait already, the most allowed; try again later")
        seed = request.sampling.seed
        active = ActiveRequest(
            request,
            self._num_arrived,
            self._max_length(request),
            self._rng.getrandbits(64) if seed is None else seed,
            list(request.tokens),
            matcher=self._matcher(request),
        )
        self._num_arrived += 1
        self._all[request.name] = active
        self._scheduler.add(active)

    def check(self, request: Request) -> None:
        """Raise RequestError if a request can never be served."""
        check_request(request, self.context_length, self.vocab_size)
        self._matcher(request)
        if self._options.head is not None:
            self._options.head.refuse_request(request)
        if request.adapter and request.adapter not in self._options.adapters:
            raise RequestError("invalid", f"there is no adapter {request.adapter!r}; give one that is served")
        self._refuse_length(request)

    def check_text(self, tokens: Sequence[int]) -> None:
        """Raise RequestError if a text cannot be embedded."""
        request = Request("embed", tuple(tokens), 1)
        check_request(request, self.context_length, self.vocab_size)
        self._refuse_length(request)

    def _refuse_length(self, request: Request) -> None:
        """Raise RequestError unless the cache can hold a request."""
        if self._max_length(request) - 1 > self.num_slots:
            raise RequestError(
                "too_long",
                f"{len(request.tokens)} tokens and {request.max_tokens} more do not fit a cache of {self.num_slots} "
                f"tokens; shorten the prompt or max_tokens, or give the engine more blocks",
            )

    def _matcher(self, request: Request) -> AnswerMatcher | None:
        if (form := request.answer_form) is None:
            return None
        if self._options.grammars is None:
            raise RequestError("invalid", "this engine knows no tokenizer, so it cannot hold an answer to a schema")
        return self._options.grammars.matcher(form)

    def _max_length(self, request: Request) -> int:
        return min(len(request.tokens) + request.max_tokens, self.context_length + 1)

    def cancel(self, name: str) -> None:
        """Drop a request; nothing more is reported of it. A name that the engine does not hold is ignored."""
        active = self._all.pop(name, None)
        if active is not None:
            self._scheduler.end(active)
        self._early = [one for one in self._early if one.request != name]
        self._suspects = [one for one in self._suspects if one.request != name]

    def captures(self) -> list[Callable[[], None]]:
        """Returns functions that capture the CUDA graphs of all sizes now rather than when they are first needed."""
        return [one for graphs in (self._graphs, self._mixed_graphs) if graphs is not None for one in graphs.captures()]

    def reset(self) -> None:
        """Forget what was computed, and counts of it. There must be no requests."""
        self._forget_cache()
        self._scheduler.num_preempted = self._scheduler.num_swapped = self._scheduler.num_prefix_tokens = 0
        self._num_generated = 0
        if self._speculation is not None:
            self._speculation.reset()

    def has_work(self) -> bool:
        return bool(self._all or self._early or self._begun or self._suspects)

    def state(self) -> EngineState:
        scheduler, policy = self._scheduler, self._scheduler.policy
        return EngineState(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            num_blocks=policy.num_blocks,
            num_free_blocks=policy.num_free,
            block_size=policy.block_size,
            num_preempted=scheduler.num_preempted,
            num_prefix_tokens=scheduler.num_prefix_tokens,
            num_generated=self._num_generated,
            num_swapped=scheduler.num_swapped,
            num_drafted=0 if self._speculation is None else self._speculation.num_drafted,
            num_accepted=0 if self._speculation is None else self._speculation.num_accepted,
        )

    @torch.inference_mode()
    def step(self) -> list[GeneratedToken]:
        """Compute one step and return the tokens that are ready: one for each request, or several with drafts.

        With several stages, steps are begun until there are as many as stages; the oldest is then finished. Replicas
        that read weights together must call it equally often: one without work only passes by the weights.
        """
        if self._suspects:
            return self._judged()
        began = time.perf_counter()
        chunks = self._scheduler.schedule()
        self._step_sizes.append(sum(chunk.num_tokens for chunk in chunks))
        self.num_step_tokens = max(self._step_sizes)
        if chunks:
            if self._speculation is not None:
                chunks = self._speculation.extend(chunks)
            self._begun.append(self._begin(chunks))
        elif self.reads_together:
            self.pass_by()
        launched = None
        if self._begun and (len(self._begun) == self._num_stages or not chunks):
            launched = self._launch(self._begun.popleft())
        ready, self._launched = (self._launched, launched) if self._overlap else (launched, None)
        early, self._early = self._early, []
        tokens = self._read(ready)
        if self._speculation is not None and launched is not None:
            self._speculation.record_step(launched.chunks, time.perf_counter() - began, len(tokens))
        return early + tokens

    def _judged(self) -> list[GeneratedToken]:
        """Returns the answers that ended by NaN, if the model gives numbers for another text. Raises NumbersError if it
        gives NaN there too.
        """
        self._drain()
        if not self._texts.gives_numbers(self._sound_token, self.vocab_size):
            raise NumbersError(
                "the model gives NaN for every text: its weights are damaged or its training diverged; use an older "
                "checkpoint"
            )
        tokens, self._early, self._suspects = [*self._early, *self._suspects], [], []
        return tokens

    @property
    def reads_together(self) -> bool:
        """Do all replicas take part when one of them goes through the model?"""
        return self._ranks is not None and self._ranks.readers is not None

    def pass_by(self) -> None:
        """Take part in reading weights for a step of other replicas, which this replica does not compute."""
        assert self._ranks is not None
        self._ranks.tell(RankMessage("pass"))
        self._part.pass_by()

    def idle(self) -> None:
        """Tell other ranks that there is nothing to do, so that each finds out if one is gone."""
        if self._ranks is not None:
            self._drain()
            self._ranks.tell(RankMessage("idle"))
            self._ranks.meet()

    def close(self) -> None:
        """Tell other ranks to end."""
        if self._ranks is not None:
            self._drain()  # other ranks wait in these steps for this one
            self._ranks.tell(RankMessage("stop"))

    def replace_weights(self, model: nn.Module) -> None:
        """Take the weights of a model of the same config. Requests go on; what they have so far is computed again."""
        self._part.refuse_weights(model)
        self._forget_cache()
        self._part.take_weights(model)

    def replace_weights_from(self, checkpoint: Path) -> None:
        """Let all ranks read and take their parts of a newer checkpoint. If one cannot, none takes it."""
        self._drain()
        if self._ranks is not None:
            self._ranks.tell(RankMessage("order", order={"weights": str(checkpoint)}))
        model = read_together(self._part, checkpoint)
        self._forget_cache()
        self._part.take_weights(model)

    def _forget_cache(self) -> None:
        """Send all requests back to the queue, so that what the cache holds is computed again."""
        self._drain()
        self._scheduler.forget()

    @torch.inference_mode()
    def embed(self, tokens: Sequence[int], pool: Literal["mean", "last"]) -> Tensor:
        """Returns the last hidden states [hidden] of a text, their mean or the last one (float32, on the host)."""
        self.check_text(tokens)
        self._drain()
        return self._texts.embedding(Request("embed", tuple(tokens), 1), pool)

    @torch.inference_mode()
    def score(self, request: Request) -> list[TokenLogprobs]:
        """Returns the log-probabilities of each token of a request's prompt but the first, with as many of the
        likeliest tokens as the request asks for. Nothing is generated.
        """
        self.check(replace(request, max_tokens=1))
        self._drain()
        number = min(request.sampling.num_logprobs or 0, self.vocab_size)
        return self._texts.logprobs(request, self.vocab_size, number)

    @torch.inference_mode()
    def _drain(self) -> None:
        """Finish the steps that have begun; their tokens are returned by the next step."""
        while self._begun:
            self._early += self._read(self._launch(self._begun.popleft()))
        self._early += self._read(self._launched)
        self._launched = None

    def _begin(self, chunks: list[ScheduledChunk]) -> BegunStep:
        """Prepare a step, and tell the other ranks to compute it."""
        for chunk in chunks:
            if chunk.active.has_new_row:
                self._sampler.admit(chunk.active)
                chunk.active.has_new_row = False
        layout = self._part.layout
        if self._graphs is not None and all(is_decode(chunk, layout) for chunk in chunks):
            return BegunStep(chunks, None)
        chunks = sorted(chunks, key=lambda chunk: (not chunk.samples, not is_decode(chunk, layout)))
        inputs = step_inputs(chunks, layout)
        if self._ranks is not None:
            self._ranks.tell(RankMessage("step", inputs))
        return BegunStep(chunks, inputs)

    def _launch(self, begun: BegunStep) -> LaunchedStep:
        """Compute this rank's part of a step, and sample."""
        chunks = begun.chunks
        if begun.inputs is None:
            assert self._graphs is not None
            sampled_from: tuple[Tensor, Tensor] | None = self._graphs.run(chunks)
        elif self._mixed_graphs is not None and self._mixed_graphs.can_run(begun.inputs):
            sampled_from = self._mixed_graphs.run(begun.inputs)
        else:
            runs = runs_of(chunks, self._part.layout)
            of_adapters = ((run.active.request.adapter, run.num_tokens) for run in runs)
            self._part.adapters.choose(of_adapters, self._part.device)
            sampled_from = self._part.logits(begun.inputs, self._sampler.last if self._is_alone else None)
        if sampled_from is None:
            return LaunchedStep(chunks, None, None)
        logits, positions = sampled_from
        if any(chunk.active.matcher is not None for chunk in chunks):
            # What a schema allows depends on the tokens before. The device computes logits while these are read.
            self._early += self._read(self._launched)
            self._launched = None
        members = [chunk.active for chunk in chunks for _ in range(chunk.num_rows)]
        left = [index for index, active in enumerate(members) if not active.is_done]  # others were cancelled meanwhile
        if len(left) < len(members):
            chunks = [chunk for chunk in chunks if not chunk.active.is_done]
            members, logits, positions = [members[index] for index in left], logits[left], positions[left]
        if not members:
            return LaunchedStep(chunks, None, None)
        return self._to_host(chunks, self._sampler.sample(logits, members, positions))

    def _to_host(self, chunks: list[ScheduledChunk], sampled: SampledTokens) -> LaunchedStep:
        if self._part.device.type != "cuda":
            return LaunchedStep(chunks, sampled, None)
        copies = SampledTokens._make(one if one is None else one.to("cpu", non_blocking=True) for one in sampled)
        is_copied = torch.cuda.Event()
        is_copied.record()
        return LaunchedStep(chunks, copies, is_copied)

    def _read(self, step: LaunchedStep | None) -> list[GeneratedToken]:
        """Wait for a step's tokens; requests that are done with them leave the engine."""
        if step is None:
            return []
        sampled = step.wait()
        tokens = [] if sampled is None else sampled.tokens.tolist()
        results: list[GeneratedToken] = []
        row = 0
        for chunk in step.chunks:
            first, row = row, row + chunk.num_rows
            active = chunk.active
            if active.is_done:
                continue
            taken = self._take_valid(chunk, tokens[first:row])
            number = active.request.sampling.num_logprobs
            if number is not None and sampled is not None:
                rows = enumerate(taken, first)
                taken = [replace(one, logprobs=sampled.logprobs_of(index, number)) for index, one in rows]
            results += taken
            if active.held is not None:
                # After a request was sent back and came again, its blocks may have less than an older chunk computed.
                num_computed = min(chunk.end + max(0, len(taken) - 1), active.num_computed)
                self._scheduler.policy.record(active.held, active.tokens, num_computed)
            if taken and taken[-1].finish is not None:
                self._scheduler.end(active, is_shared=taken[-1].finish != "nan")
                del self._all[active.request.name]
        if tokens and max(tokens) < 0:
            self._suspects += results
            return []
        self._num_generated += len(results)
        return results

    def _take_valid(self, chunk: ScheduledChunk, tokens: Sequence[int]) -> list[GeneratedToken]:
        """Take the tokens sampled after a chunk: each is valid if all drafts before it were right."""
        active, taken = chunk.active, list[GeneratedToken]()
        for index, token in enumerate(tokens):
            taken.append(self._take_token(active, token))
            if taken[-1].finish is not None or chunk.drafts[index : index + 1] != (token,):
                break
        if self._speculation is not None and taken:
            active.num_computed += len(taken) - 1
            self._speculation.record(chunk, len(taken) - 1)
        active.num_unread -= bool(tokens)
        return taken

    def _take_token(self, active: ActiveRequest, token: int) -> GeneratedToken:
        if token < 0:
            return GeneratedToken(active.request.name, token, finish="nan")
        self._sound_token = active.request.tokens[0]
        active.tokens.append(token)
        finish: Finish | None = None
        if active.matcher is not None and not active.matcher.accept(token):
            finish = "stuck"
        elif token in active.request.stop_tokens or (active.matcher is not None and active.matcher.is_complete):
            finish = "stop"
        elif len(active.tokens) == active.max_length:
            finish = "length"
        return GeneratedToken(active.request.name, token, finish=finish, num_cached=active.num_cached or 0)
