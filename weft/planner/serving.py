"""Predicts how a model is served on a cluster: memory, requests held, time to the first token, tokens per second.

A workload is simulated by the engine's own scheduler (`serve/scheduling/scheduler.py`): for each step that it
schedules, the time of every stage is the sum of its kernels (`kernels.py`), its reads of the key-value cache and its
collectives (`serve/parallel/traffic.py`). The floor of a step is what no kernel can beat: weights and cache read once
at the printed bandwidth, or the FLOPs at the printed peak, whichever takes longer.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from weft.architectures import TransformerConfig
from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster, ring_seconds
from weft.errors import PlanError
from weft.plan import Plan
from weft.planner.kernels import LAUNCH_SECONDS, Kernels
from weft.planner.lean_kernels import (
    SPLIT_KERNELS,
    decode_reads,
    expert_products,
    packed_product,
    prompt_attention,
    refuse_experts,
    routing_seconds,
    small_kernels,
)
from weft.planner.micro_batch import LINK_SHARE
from weft.planner.serving_streaming import StreamedStage, StreamingPrice, streamed_stage
from weft.profiling.software import software_for_text
from weft.serve.attention.attend import merge_bytes
from weft.serve.attention.formats import cache_format
from weft.serve.model.mixed_graph import MAX_TOKENS
from weft.serve.model.model_part import GPU_SHARE
from weft.serve.parallel.rank_part import RankPlace, part_bytes, refuse_model, stage_of
from weft.serve.parallel.traffic import ServedSizes, step_calls
from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk, Scheduler
from weft.serve.spec import ServingSpec, default_on
from weft.serve.weights.weight_formats import weight_format

BLOCK_SIZE = 16
TOKEN_BUDGET, MAX_RUNNING = (int(default_on(name, "cuda")) for name in ("token_budget", "max_running"))
# Kernels and copies of a step outside of its layers: two arrays of inputs are copied to the device and to their places,
# seven kernels find tokens and their embeddings, two choose new tokens and keep them, one copy gives them to the host.
STEP_KERNELS = 14
# Host time of a step that is not a CUDA graph: torch issues about so many operations for each layer.
OPERATIONS_PER_LAYER, HOST_SECONDS = 14, 10e-6
SAMPLING_PASSES = 4  # over the logits, in float32


@dataclass(frozen=True)
class ServingWorkload:
    """Requests that arrive at once: the tokens of each prompt, and of each answer."""

    lengths: tuple[tuple[int, int], ...]

    @staticmethod
    def of(num_requests: int, prompt: int, output: int) -> ServingWorkload:
        return ServingWorkload(((prompt, output),) * num_requests)

    @property
    def mean_tokens(self) -> float:
        return sum(map(sum, self.lengths)) / len(self.lengths)


@dataclass(frozen=True)
class ServingTimes:
    """What simulating requests gives. `shares` are the shares of the device's time, by cause."""

    seconds: float
    floor_seconds: float
    num_tokens: int
    first_token_seconds: float  # median
    shares: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def floor_tokens_per_second(self) -> float:
        return self.num_tokens / self.floor_seconds


@dataclass(frozen=True)
class ServingPrediction:
    """A layout, and what it gives. Bytes are those of the fullest device."""

    plan: Plan
    weight_bytes: int
    cache_bytes_per_token: float
    memory_bytes: int
    cache_tokens: int  # of one replica
    requests_held: int  # of all replicas
    alone: ServingTimes  # one request
    loaded: ServingTimes  # the workload, all replicas
    streaming: StreamingPrice | None = None
    merged_bytes: int = 0  # that ranks of `context` gather in a layer for each token


@dataclass(frozen=True)
class _StageStep:
    """Seconds of one step on one stage by cause, and the least that the device allows."""

    by_cause: dict[str, float]
    floor_seconds: float

    @property
    def seconds(self) -> float:
        return sum(self.by_cause.values())


class ServingModel:
    """The times of steps of one model under one plan."""

    def __init__(
        self,
        config: TransformerConfig,
        cluster: Cluster,
        plan: Plan,
        precision: str,
        spec: ServingSpec = ServingSpec(),  # noqa: B008 (a frozen value)
        has_codes: bool = False,
    ) -> None:
        """`has_codes`: the format `spec.weights` is that of the model's folder, whose experts are decoded."""
        refuse_model(config)
        self.config, self.cluster, self.plan = config, cluster, plan
        self.sizes = ServedSizes.of(config)
        software = software_for_text(cluster)
        if software.attention == "flash3":  # of training: the engine has FlashAttention-2, and kernels of its own
            software = replace(software, attention="flash2")
        self.kernels = Kernels(cluster.node.device, software, precision)
        stages = [dict.fromkeys(plan.degrees, 0) | {"pipe": index} for index in range(plan.pipe.degree)]
        places = {stage_of(RankPlace(plan, one)): RankPlace(plan, one) for one in stages}
        self._layer_kinds = [
            Counter(self.sizes.expert_layers[layer] for layer in self.sizes.stage_layers(plan, stage))
            for stage in range(plan.pipe.degree)
        ]
        self._cache_format = cache_format(spec.cache)
        device = "cpu" if is_cpu(cluster) else "cuda"
        self._format = None if spec.weights is None else weight_format(spec.weights, device)
        self._expert_format = None if has_codes else self._format
        refuse_experts(config, self.kernels, self._expert_format, self.sizes)
        self._weight_bytes = [
            part_bytes(config, places[stage], self.kernels.item_bytes, self._format, not has_codes)
            for stage in range(plan.pipe.degree)
        ]
        self._streamed: list[StreamedStage] = []  # if weights are in host memory
        if spec.stream_weights:
            self._streamed = [
                streamed_stage(
                    config,
                    cluster,
                    one,
                    self.kernels.item_bytes,
                    self._format,
                    spec,
                    self._call_seconds,
                    not has_codes,
                )
                for _, one in sorted(places.items())
            ]
            for stage, streamed in enumerate(self._streamed):
                self._weight_bytes[stage] -= streamed.saved_bytes

    @property
    def merged_bytes(self) -> int:
        """Bytes that ranks of `context` gather in a layer for each token; 0 if each has all tokens."""
        sizes, context = self.sizes, self.plan.context.degree
        heads = (sizes.num_heads // self.plan.tensor.x, sizes.head_dim)
        return merge_bytes(1, *heads, context, self.kernels.item_bytes) if context > 1 else 0

    def streaming_price(self, num_cached: float = 0.0) -> StreamingPrice | None:
        """That of the stage that copies most, with room for so many tokens in the cache; None if weights stay on the
        device.
        """
        if not self._streamed:
            return None
        most = max(range(len(self._streamed)), key=lambda stage: self._streamed[stage].copied_bytes)
        flops, one = 0.0, self._streamed[most]  # of a token
        for has_experts, number in self._layer_kinds[most].items():
            for rows, inner, columns, times, _ in self._products(1, has_experts):
                flops += 2 * number * times * rows * inner * columns
        tokens = math.ceil(one.seconds * self.kernels.peak / flops)
        fitting = min(self._fitting_blocks(stage, num_cached) for stage in range(len(self._streamed)))
        sizes = (one.host_bytes, len(one.block_bytes), one.num_resident, fitting)
        return StreamingPrice(one.copied_bytes, one.gathered_bytes, one.seconds, tokens, *sizes)

    def _fitting_blocks(self, stage: int, num_cached: float) -> int:
        """How many blocks of a stage fit its device beside so many tokens of the cache."""
        streamed = self._streamed[stage]
        needed = self._bytes_beside(stage) + num_cached * self.cache_bytes(stage)
        others = self._weight_bytes[stage] - streamed.resident_bytes
        return streamed.fitting_blocks(self.cluster.node.device.memory_bytes - others - needed / GPU_SHARE)

    @property
    def weight_bytes(self) -> int:
        return max(self._weight_bytes)

    def cache_bytes(self, stage: int) -> float:
        """Bytes of a token's keys and values on one rank of a stage; the mean over ranks that hold pages together."""
        of_layer = self._cache_format.bytes_per_token(*self._heads) / self.plan.context.degree
        return of_layer * len(self.sizes.stage_layers(self.plan, stage))

    def bytes_beside_pages(self, stage: int) -> int:
        """Bytes of the cache on one rank of a stage beside pages, for as many requests as may run."""
        form, num_layers = self._cache_format, len(self.sizes.stage_layers(self.plan, stage))
        return num_layers * ((MAX_RUNNING + 1) * form.bytes_per_row(*self._heads) + form.bytes_of_layer(*self._heads))

    @property
    def _heads(self) -> tuple[int, int, int]:
        """Key heads of a rank, their size, and the bytes of a number."""
        return self.sizes.key_heads(self.plan.tensor.x), self.sizes.head_dim, self.kernels.item_bytes

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; negative if the weights do not fit."""
        fits = []
        for stage, own_bytes in enumerate(self._weight_bytes):
            free = self.cluster.node.device.memory_bytes - own_bytes
            fits.append((GPU_SHARE * free - self._bytes_beside(stage)) / self.cache_bytes(stage))
        return math.floor(min(fits))

    def _bytes_beside(self, stage: int) -> int:
        """Bytes of a step's tensors, and of the cache beside its pages, on one rank of a stage."""
        sizes, x = self.sizes, self.plan.tensor.x
        widest = max(sizes.projected(x), 2 * sizes.inner // x, sizes.hidden)
        beside = 16 * TOKEN_BUDGET * widest + 24 * MAX_RUNNING * sizes.vocab
        return beside + self.bytes_beside_pages(stage)

    def step(self, chunks: Sequence[ScheduledChunk], stage: int) -> _StageStep:
        decodes = [chunk for chunk in chunks if chunk.end - chunk.start == 1]
        prompts = tuple((chunk.end - chunk.start, chunk.end) for chunk in chunks if chunk.end - chunk.start > 1)
        num_sampled = sum(chunk.samples for chunk in chunks)
        num_cached = sum(self._num_seen(chunk.end) for chunk in decodes)
        return self._step(stage, len(decodes), num_cached, prompts, num_sampled)

    def _num_seen(self, length: int) -> int:
        """The tokens that a decode of a request with so many tokens attends to."""
        return length if self.sizes.window is None else min(length, self.sizes.window)

    def decode_seconds(self, length: int, num_layers: int | None = None) -> float:
        """Seconds of a decode of one request with so many tokens, by all layers or the first of them and the head."""
        seconds = self._step(0, 1, self._num_seen(length), (), 1).seconds
        if num_layers is None:
            return seconds
        head = self.kernels.product(1, self.sizes.hidden, self.sizes.vocab)
        return head + (seconds - head) * num_layers / self.sizes.num_layers

    def draft_check_seconds(self, num_drafts: int, length: int) -> float:
        """Seconds of a step of one request that computes a token and so many drafts, and samples after each."""
        if num_drafts == 0:
            return self.decode_seconds(length)
        if self._cache_format.name != "plain":  # each attends as a decode of its own, and the step is no CUDA graph
            number = 1 + num_drafts
            return self._step(0, number, number * self._num_seen(length), (), number, may_be_graph=False).seconds
        return self._step(0, 0, 0, ((1 + num_drafts, length + num_drafts),), 1 + num_drafts).seconds

    def _step(
        self,
        stage: int,
        num_decodes: int,
        num_cached: int,
        prompts: tuple[tuple[int, int], ...],
        num_sampled: int,
        may_be_graph: bool = True,
    ) -> _StageStep:
        """Decodes read `num_cached` tokens of the cache; prompts are (tokens computed, tokens up to their end)."""
        sizes, kernels, plan, x = self.sizes, self.kernels, self.plan, self.plan.tensor.x
        num_tokens = num_decodes + sum(computed for computed, _ in prompts)
        layers = sizes.stage_layers(plan, stage)
        is_last = stage == plan.pipe.degree - 1
        matmul, flops, num_read = self._matmuls(stage, num_tokens, num_sampled * is_last)
        routing = self._expert_format if plan.expert == 1 else None  # among several ranks, by plain functions
        small = self._layer_kinds[stage][True] * routing_seconds(kernels, routing, num_tokens, sizes)
        heads = (sizes.num_heads // x, sizes.key_heads(x), sizes.head_dim)
        attention, cache = (
            len(layers) * one / plan.context.degree
            for one in decode_reads(kernels, self._cache_format, num_decodes, num_cached, heads)
        )
        for chunk in prompts:
            given = (*chunk, sizes.window, (sizes.num_heads // x, sizes.head_dim))
            seconds, own = prompt_attention(kernels, self._cache_format, *given)
            attention += len(layers) * seconds / plan.context.degree
            flops += len(layers) * own / plan.context.degree
        moved = num_tokens * len(layers) * kernels.item_bytes * (4 * sizes.hidden + 3 * sizes.inner // x)
        moved += SAMPLING_PASSES * 4 * num_sampled * sizes.vocab * is_last
        of_context = SPLIT_KERNELS * (plan.context.degree > 1)
        launches = small_kernels(self._cache_format, num_tokens, num_decodes) + of_context
        small += moved / kernels.bytes_per_second + (launches * len(layers) + STEP_KERNELS) * LAUNCH_SECONDS
        by_cause = {
            "weights and matmuls": matmul,
            "attention and its cache": attention,
            "other kernels": small,
            "communication": self._communication(stage, num_tokens, num_sampled),
        }
        if not (may_be_graph and self._is_graph(num_tokens, bool(prompts))):
            host = (max(OPERATIONS_PER_LAYER, launches) + of_context) * len(layers) * HOST_SECONDS
            by_cause["waiting for the host"] = max(0.0, host - sum(by_cause.values()))
        assert self.cluster.node.device.memory_bandwidth_bytes_per_second is not None
        read = (num_read + cache) / self.cluster.node.device.memory_bandwidth_bytes_per_second
        if self._streamed:  # while blocks compute
            streamed = self._streamed[stage]
            by_cause["copies from host memory"] = max(0.0, streamed.seconds - sum(by_cause.values()))
            read = max(read, streamed.floor_seconds)
        return _StageStep(by_cause, max(read, flops / kernels.peak))

    def _matmuls(self, stage: int, num_tokens: int, num_sampled: int) -> tuple[float, float, float]:
        """Seconds and FLOPs of a stage's products, and the bytes of weights that they read."""
        sizes, kernels = self.sizes, self.kernels
        total, flops, num_read = 0.0, 0.0, 0.0
        for has_experts, number in self._layer_kinds[stage].items():
            for rows, inner, columns, times, are_experts in self._products(num_tokens, has_experts):
                if are_experts:
                    given = (self._expert_format, num_tokens, rows, inner, columns, times)
                    seconds, stored = expert_products(kernels, *given)
                else:
                    seconds, stored = self._product(max(1, round(rows)), inner, columns)
                total, num_read = total + number * seconds, num_read + number * stored
                flops += 2 * number * times * rows * inner * columns
        if num_sampled:
            inner, columns = sizes.hidden // self.plan.tensor.y, -(-sizes.vocab // self.plan.tensor.x)
            total += kernels.product(num_sampled, inner, columns)
            flops += 2 * num_sampled * sizes.hidden * columns
            num_read += kernels.item_bytes * inner * columns
        return total, flops, num_read

    def _is_graph(self, num_tokens: int, has_prompts: bool) -> bool:
        """Is a step without drafts a CUDA graph?"""
        form, has_ranks = self._cache_format, self.plan.num_ranks > self.plan.data
        has_kernel = form.has_kernel(self.plan.context.degree > 1)
        is_recorded = form.kind == "plain" and num_tokens <= MAX_TOKENS if has_prompts else has_kernel
        is_recorded = is_recorded and self.kernels.item_bytes == 2
        return is_recorded and not has_ranks and not self._streamed

    def _product(self, rows: int, inner: int, columns: int) -> tuple[float, int]:
        """Seconds of a matmul, and the bytes of its weight."""
        kernels = self.kernels
        if self._format is None:
            seconds, stored = kernels.product(rows, inner, columns), kernels.item_bytes * inner * columns
            starts_early = rows == 1 and kernels.device.is_newer  # while the kernel before it ends
            return seconds - LAUNCH_SECONDS * starts_early, stored
        return packed_product(kernels, self._format, rows, inner, columns)

    def _products(self, num_tokens: int, has_experts: bool) -> Iterable[tuple[float, int, int, float, bool]]:
        """The matmuls of a layer on one rank: (rows, inner, columns, how many, are they those of experts)."""
        sizes, x, y = self.sizes, self.plan.tensor.x, self.plan.tensor.y
        yield num_tokens, sizes.hidden // y, sizes.projected(x), 1, False
        yield num_tokens, sizes.num_heads // x * sizes.head_dim, sizes.hidden // y, 1, False
        if not has_experts:
            yield num_tokens, sizes.hidden // y, (1 + sizes.is_gated) * sizes.inner // x, 1, False
            yield num_tokens, sizes.inner // x, sizes.hidden // y, 1, False
            return
        missed = (1 - sizes.num_experts_per_tok / sizes.num_experts) ** num_tokens
        used = max(1.0, sizes.num_experts * (1 - missed) / self.plan.expert)  # experts that get a token
        rows = num_tokens * sizes.num_experts_per_tok / self.plan.expert / used
        inner = self._expert_inner
        yield rows, sizes.hidden, 2 * inner, used, True
        yield rows, inner, sizes.hidden, used, True
        if sizes.shared_inner:
            yield num_tokens, sizes.hidden, 2 * sizes.shared_inner // x, 1, False
            yield num_tokens, sizes.shared_inner // x, sizes.hidden, 1, False

    @property
    def _expert_inner(self) -> int:
        return int(getattr(self.config, "moe_intermediate_size", self.sizes.inner))

    def _communication(self, stage: int, num_tokens: int, num_sampled: int) -> float:
        if self.plan.num_ranks == self.plan.data:
            return 0.0
        total = 0.0
        calls = step_calls(self.sizes, self.plan, stage, num_tokens, num_sampled, self.kernels.item_bytes)
        for ((axis, operation), num_bytes), number in Counter(calls).items():
            total += number * self._call_seconds(axis, operation, num_bytes)
        return total

    def _call_seconds(self, axis: str, operation: str, num_bytes: int) -> float:
        inner, degree = self.plan.place(axis)
        link = self.cluster.axis_link(inner, degree, operation == "send")
        wire, where = (self.cluster.node.inter, "inter") if link.crosses_nodes else (self.cluster.node.intra, "intra")
        bandwidth = link.bandwidth_bytes_per_second * (wire.share or LINK_SHARE[where])
        return ring_seconds(operation, num_bytes, degree, bandwidth, link.latency_seconds) + wire.start_seconds

    def simulate(self, lengths: Sequence[tuple[int, int]], cache_tokens: int) -> ServingTimes:
        """Serve requests that arrive at once on one replica, by the engine's scheduler."""
        num_stages = self.plan.pipe.degree
        block_size = BLOCK_SIZE * self.plan.context.degree
        policy = PagedBlocks(min(cache_tokens // block_size, 1 << 20), block_size, prefix_cache=False)
        scheduler = Scheduler(policy, TOKEN_BUDGET, MAX_RUNNING, num_stages)
        for index, (prompt, output) in enumerate(lengths):
            request = Request(str(index), (0,), output)
            scheduler.add(ActiveRequest(request, index, prompt + output, 0, [0] * prompt))
        now, floor, free = 0.0, 0.0, [0.0] * num_stages
        first: dict[str, float] = {}
        causes: dict[str, float] = {}
        begun: deque[tuple[list[ScheduledChunk], float]] = deque()
        while scheduler.running or scheduler.waiting:
            chunks = scheduler.schedule()
            if chunks:
                ready = now
                steps = [self.step(chunks, stage) for stage in range(num_stages)]
                for stage, step in enumerate(steps):
                    ready = free[stage] = max(ready, free[stage]) + step.seconds
                slowest = max(steps, key=lambda step: step.seconds)
                floor += max(step.floor_seconds for step in steps)
                for cause, seconds in slowest.by_cause.items():
                    causes[cause] = causes.get(cause, 0.0) + seconds
                begun.append((chunks, ready))
            elif not begun:
                raise PlanError(f"a request of {max(map(sum, lengths))} tokens does not fit a cache of {cache_tokens}")
            if len(begun) == num_stages or not chunks:
                done, ready = begun.popleft()
                now = max(now, ready)
                for active in (chunk.active for chunk in done if chunk.samples):
                    active.tokens.append(0)
                    active.num_unread -= 1
                    first.setdefault(active.request.name, now)
                    if len(active.tokens) == active.max_length:
                        scheduler.end(active)
        total = sum(causes.values())
        shares = {cause: seconds / total for cause, seconds in causes.items()}
        return ServingTimes(now, floor, sum(output for _, output in lengths), median(first.values()), shares)
