"""The search for the best layout in which to serve a model: all layouts over all devices are predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

from weft.architectures import DecoderConfig, TransformerConfig
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.plan import Context, Pipe, Plan, Tensor
from weft.planner.serving import ServingModel, ServingPrediction, ServingTimes, ServingWorkload
from weft.serve.spec import ServingSpec

ALONE_OUTPUT = 32  # tokens for which one request alone is predicted
LONG_SHARE = 0.1  # of the weights' bytes, that the cache of one request takes for which `context` is tried


def serving_plans(config: TransformerConfig, num_devices: int, with_context: bool = False) -> Iterable[Plan]:
    """Yields layouts over all devices: data, pipe, expert, x, and context if it is asked for."""
    num_layers = config.num_layers
    has_experts = isinstance(config, DecoderConfig) and any(config.has_experts(index) for index in range(num_layers))
    for x, context in product(_divisors(num_devices), _divisors(num_devices) if with_context else (1,)):
        for expert in _divisors(num_devices // (x * context)) if has_experts else (1,):
            for pipe in _divisors(num_devices // (x * context) // expert):
                data = num_devices // (x * context) // expert // pipe
                if pipe <= num_layers and data * pipe * expert * context * x == num_devices:
                    parts = {"expert": expert, "context": Context(context), "tensor": Tensor(x)}
                    yield Plan(data=data, pipe=Pipe(pipe), **parts)  # type: ignore[arg-type]


def search_serving(
    config: TransformerConfig,
    cluster: Cluster,
    workload: ServingWorkload,
    precision: str = "bf16",
    spec: ServingSpec = ServingSpec(),  # noqa: B008 (a frozen value)
    has_codes: bool = False,
) -> tuple[list[ServingPrediction], list[str]]:
    """Returns the layouts that fit, most tokens per second first, and why others do not.

    `context` splits the cache alone, so it is tried where the cache of one request is much beside the weights, and only
    over plain caches, because others have no kernels for it.
    """
    found, refused = list[ServingPrediction](), list[str]()
    whole = ServingModel(config, cluster, Plan(), precision, replace(spec, stream_weights=0), has_codes)
    longest = max(map(sum, workload.lengths))
    is_long = longest * whole.costs.cache_bytes(0) > LONG_SHARE * whole.weight_bytes
    for plan in serving_plans(config, cluster.num_devices, is_long and whole.costs.cache.kind == "plain"):
        try:
            found.append(predict_serving(config, cluster, plan, workload, precision, spec, has_codes))
        except PlanError as error:
            refused.append(str(error))
    return sorted(found, key=lambda one: -one.loaded.tokens_per_second), refused


def predict_serving(
    config: TransformerConfig,
    cluster: Cluster,
    plan: Plan,
    workload: ServingWorkload,
    precision: str = "bf16",
    spec: ServingSpec = ServingSpec(),  # noqa: B008 (a frozen value)
    has_codes: bool = False,
) -> ServingPrediction:
    """Predict a layout. Raises PlanError if the model or a request does not fit.

    `has_codes`: the weights are those of a folder (`ServingModel`).
    """
    model = ServingModel(config, cluster, plan, precision, spec, has_codes)
    cache_tokens = model.cache_tokens
    longest = max(map(sum, workload.lengths))
    if cache_tokens < longest:
        raise PlanError(
            f"{plan.describe_axes() or 'one device'}: {model.weight_bytes / 1e9:.1f} GB of weights of a device's "
            f"{cluster.node.device.memory_bytes / 1e9:.0f} GB leave no room for a request of {longest} tokens; "
            f"{'lower --resident-blocks, or ' if spec.resident_blocks else ''}split the model over more devices"
        )
    shortest = workload.lengths[0][0]
    alone = model.simulate([(shortest, ALONE_OUTPUT)], cache_tokens)
    per_replica = workload.lengths[:: plan.data]
    loaded = model.simulate(per_replica, cache_tokens)
    every = ServingTimes(
        loaded.seconds,
        loaded.floor_seconds,
        sum(output for _, output in workload.lengths),
        loaded.first_token_seconds,
        loaded.shares,
    )
    held = plan.data * min(model.costs.max_running, int(cache_tokens / workload.mean_tokens))
    per_token = max(model.costs.cache_bytes(stage) for stage in range(plan.pipe.degree))
    beside = max(model.costs.bytes_beside_pages(stage) for stage in range(plan.pipe.degree))
    memory = math.ceil(model.weight_bytes + cache_tokens * per_token + beside)
    sizes = (model.weight_bytes, per_token, memory, cache_tokens, held)
    num_cached = max(longest, min(model.costs.max_running, len(per_replica)) * workload.mean_tokens)
    return ServingPrediction(plan, *sizes, alone, every, model.streaming_price(num_cached), model.costs.merged_bytes)


@lru_cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(value for value in range(1, number + 1) if number % value == 0)
