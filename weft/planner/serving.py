"""Predicts how a model is served on a cluster: memory, requests held, time to the first token, tokens per second.

The engine's own scheduler runs a workload (`serve/scheduling/scheduler_run.py`). `serve/costs.py` says what each step
does on each stage; its time is the sum of its kernels (`lean_kernels.py`) and collectives. The floor of a step is what
no kernel can beat: weights and cache read once at the printed bandwidth, or the FLOPs at the printed peak, whichever
takes longer.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from statistics import median
from typing import Any

from weft.architectures import TransformerConfig
from weft.cluster.hardware import Cluster, ring_seconds
from weft.comm import Key
from weft.errors import PlanError
from weft.plan import Plan
from weft.planner.kernels import LAUNCH_SECONDS, Kernels
from weft.planner.lean_kernels import cache_seconds, product_seconds, prompt_seconds, refuse_precision, routing_seconds
from weft.planner.micro_batch import LINK_SHARE
from weft.planner.step import HOST_LINK_SHARE
from weft.profiling.software import software_for_text
from weft.serve.costs import ServedCosts, StepWork
from weft.serve.scheduling.scheduler_run import RequestArrival, RunTimes
from weft.serve.spec import ServingSpec
from weft.sharding.host_memory import KEPT_FREE_BYTES

# Host time of a step that is not a CUDA graph: torch issues about so many operations for each layer.
OPERATIONS_PER_LAYER, HOST_SECONDS = 14, 10e-6
# What the time of a step is for; the last two not in all steps.
ALWAYS = ("weights and matmuls", "attention and its cache", "other kernels", "communication")
CAUSES = (*ALWAYS, "waiting for the host", "copies from host memory")
# NCCL sends few bytes by its low-latency protocol (LL): the start of a collective, and hops and rates as shares of
# those of its usual one, for which the catalog's latencies are (src/graph/tuning.cc of NCCL 2.18 to 2.27: 6.6 us; 0.6
# of 3.4 us over NVLink and 2.7 of 14 over a network; a quarter of the rate).
LOW_LATENCY_START, LOW_LATENCY_HOP, LOW_LATENCY_RATE = 6.6e-6, 0.18, 0.25


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
class StreamingPrice:
    """What weights in host memory cost: bytes of a step that a device copies, and that replicas gather; the seconds of
    both; and with how many tokens of a step its products take as long. Of a rank's blocks, `resident_blocks` stay on
    the device, `fitting_blocks` would fit it beside the cache of the load, and the others take `host_bytes`.
    """

    copied_bytes: int
    gathered_bytes: int
    copy_seconds: float
    break_even_tokens: int
    host_bytes: int
    num_blocks: int
    resident_blocks: int
    fitting_blocks: int


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
        """`has_codes`: the format `spec.weights` is that of the model's folder, whose experts are dequantised."""
        self.cluster, self.plan, self._device = cluster, plan, cluster.node.device
        software = software_for_text(cluster)
        if software.attention == "flash3":  # of training: the engine has FlashAttention-2, and kernels of its own
            software = replace(software, attention="flash2")
        self.kernels = Kernels(self._device, software, precision)
        self.costs = ServedCosts(config, plan, self.kernels.item_bytes, spec, has_codes, self._device.is_newer)
        refuse_precision(self.kernels, self.costs)
        self._streamed_seconds = [
            self._copy_seconds(one.host_bytes, one.copied_bytes, one.calls) if one else 0.0
            for one in self.costs.streamed
        ]

    @property
    def weight_bytes(self) -> int:
        return max(self.costs.weight_bytes)

    @property
    def cache_tokens(self) -> int:
        """Tokens whose keys and values fit beside the weights; negative if the weights do not fit."""
        return math.floor(self.costs.cache_tokens(self._device.memory_bytes))

    # --- weights in host memory: each device reads them over a link of its own

    def _copy_seconds(self, host_bytes: int, copied_bytes: int, calls: Iterable[tuple[Key, int]]) -> float:
        """Return the seconds of a step's copies and gathers, which go on at the same time. Raises PlanError."""
        node = self.cluster.node
        if node.host_link_bytes_per_second is None:
            raise PlanError(
                "the cluster's file does not say how fast devices read host memory, which --stream-weights needs; give "
                "node.host_link_bytes_per_second"
            )
        num_devices = min(self.plan.num_ranks, node.num_devices)
        if host_bytes * num_devices > node.host_memory_bytes - KEPT_FREE_BYTES:
            raise PlanError(
                f"{host_bytes / 1e9:.1f} GB of streamed weights for each of {num_devices} devices of a node do not "
                f"fit its {node.host_memory_bytes / 1e9:.0f} GB of host memory; raise --resident-blocks, or keep "
                f"weights in fewer bits (--weights)"
            )
        gathers = sum(self._call_seconds(*key, size) for key, size in calls)
        return max(copied_bytes / (node.host_link_bytes_per_second * HOST_LINK_SHARE), gathers)

    def streaming_price(self, num_cached: float = 0.0) -> StreamingPrice | None:
        """Return that of the stage that copies most, with room for so many tokens in the cache; None if weights stay
        on the device.
        """
        streamed = [one for one in self.costs.streamed if one]
        if not streamed:
            return None
        most = max(range(len(streamed)), key=lambda stage: streamed[stage].copied_bytes)
        one, seconds = streamed[most], self._streamed_seconds[most]
        flops = _flops(self.costs.step(most, 1, 0, (), 0))
        fitting = min(
            self.costs.fitting_blocks(stage, num_cached, self._device.memory_bytes) for stage in range(len(streamed))
        )
        sizes = (one.host_bytes, len(one.block_bytes), one.num_resident, fitting)
        gathered, tokens = sum(size for _, size in one.calls), math.ceil(seconds * self.kernels.peak / flops)
        return StreamingPrice(one.copied_bytes, gathered, seconds, tokens, *sizes)

    # --- steps

    def decode_seconds(self, length: int, num_layers: int | None = None) -> float:
        """Return the seconds of a decode of one request with so many tokens, by all layers or the first of them and
        the head.
        """
        seconds = self.step(0, 1, self.costs.num_seen(length), (), 1).seconds
        if num_layers is None:
            return seconds
        head = self.kernels.product(1, self.costs.sizes.hidden, self.costs.sizes.vocab)
        return head + (seconds - head) * num_layers / self.costs.sizes.num_layers

    def draft_check_seconds(self, num_drafts: int, length: int) -> float:
        """Return the seconds of a step of one request that computes a token and so many drafts, and samples after
        each.
        """
        if num_drafts == 0:
            return self.decode_seconds(length)
        if self.costs.cache.name != "plain":  # each attends as a decode of its own, and the step is no CUDA graph
            number = 1 + num_drafts
            return self.step(0, number, number * self.costs.num_seen(length), (), number, may_be_graph=False).seconds
        return self.step(0, 0, 0, ((1 + num_drafts, length + num_drafts),), 1 + num_drafts).seconds

    def step(
        self,
        stage: int,
        num_decodes: int,
        num_cached: int,
        prompts: tuple[tuple[int, int], ...],
        num_sampled: int,
        may_be_graph: bool = True,
    ) -> _StageStep:
        """Return the time of a step. Decodes read `num_cached` tokens of the cache; prompts are (tokens computed,
        tokens up to their end).
        """
        work, kernels = (
            self.costs.step(stage, num_decodes, num_cached, prompts, num_sampled, may_be_graph),
            self.kernels,
        )
        num_layers, launches = work.num_layers, work.layer_kernels
        attention = cache_seconds(kernels, work.cache) + sum(prompt_seconds(kernels, one) for one in work.prompts)
        routing = 0.0 if work.routing is None else work.routing[0] * routing_seconds(kernels, work.routing[1])
        small = (
            work.moved_bytes / kernels.bytes_per_second + (launches * num_layers + work.step_kernels) * LAUNCH_SECONDS
        )
        calls = sum(number * self._call_seconds(*key, size) for (key, size), number in work.calls.items())
        products = sum(number * product_seconds(kernels, one) for number, one in work.products)
        by_cause = dict(
            zip(ALWAYS, (products, num_layers * attention * work.share, routing + small, calls), strict=True)
        )
        if not work.is_graph:
            host = (max(OPERATIONS_PER_LAYER, launches) + work.extra_calls) * num_layers * HOST_SECONDS
            by_cause["waiting for the host"] = max(0.0, host - sum(by_cause.values()))
        assert self._device.memory_bandwidth_bytes_per_second is not None
        read = num_layers * work.cache.page_bytes * work.share
        read += sum(number * one.number * one.weight_bytes for number, one in work.products)
        floor = max(read / self._device.memory_bandwidth_bytes_per_second, _flops(work) / kernels.peak)
        if (streamed := self.costs.streamed[stage]) is not None:  # copied while blocks compute
            rate = self.cluster.node.host_link_bytes_per_second
            assert rate is not None
            by_cause["copies from host memory"] = max(0.0, self._streamed_seconds[stage] - sum(by_cause.values()))
            floor = max(floor, streamed.copied_bytes / rate)
        return _StageStep(by_cause, floor)

    @lru_cache(maxsize=4096)  # noqa: B019 (a model lives as long as its search)
    def _call_seconds(self, axis: str, operation: str, num_bytes: int) -> float:
        inner, degree = self.plan.place(axis)
        link = self.cluster.axis_link(inner, degree, operation == "send")
        wire, where = (self.cluster.node.inter, "inter") if link.crosses_nodes else (self.cluster.node.intra, "intra")
        bandwidth = link.bandwidth_bytes_per_second * (wire.share or LINK_SHARE[where])
        usual = ring_seconds(operation, num_bytes, degree, bandwidth, link.latency_seconds) + wire.start_seconds
        hop, rate = LOW_LATENCY_HOP * link.latency_seconds, LOW_LATENCY_RATE * bandwidth
        return min(usual, ring_seconds(operation, num_bytes, degree, rate, hop) + LOW_LATENCY_START)

    # --- requests

    def simulate(
        self, lengths: Sequence[tuple[int, int]], cache_tokens: int, has_stretches: bool = True
    ) -> ServingTimes:
        """Serve requests that arrive at once on one replica, by the engine's scheduler."""
        times = self.run([RequestArrival(*one) for one in lengths], cache_tokens, has_stretches)
        shares = dict(zip(CAUSES, (seconds / sum(times.by_cause) for seconds in times.by_cause), strict=True))
        shares = {cause: share for cause, share in shares.items() if share or cause in ALWAYS}
        num_tokens = sum(output for _, output in lengths)
        return ServingTimes(times.seconds, times.floor_seconds, num_tokens, median(times.first), shares)

    def run(self, arrivals: Sequence[RequestArrival], cache_tokens: int, has_stretches: bool = True) -> RunTimes:
        """Serve requests that arrive at given times on one replica. Raises PlanError if the cache does not hold one."""
        found = self.costs.run(arrivals, cache_tokens, self._price, has_stretches)
        if found is None:
            longest = max(one.prompt + one.output for one in arrivals)
            raise PlanError(f"a request of {longest} tokens does not fit a cache of {cache_tokens}")
        return found

    def _price(self, *step: Any) -> tuple[float, float, tuple[float, ...]]:
        found = self.step(*step)
        return found.seconds, found.floor_seconds, tuple(found.by_cause.get(cause, 0.0) for cause in CAUSES)


def _flops(work: StepWork) -> float:
    """Return the FLOPs of a step's products, and of the attention of its prompts."""
    products = sum(2 * number * one.number * one.rows * one.inner * one.columns for number, one in work.products)
    return products + work.num_layers * work.share * sum(4 * one.head_dim * one.num_scores for one in work.prompts)
