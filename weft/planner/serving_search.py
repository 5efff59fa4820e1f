"""The search for the best layout in which to serve a model: all layouts over all devices are predicted."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from itertools import product

from weft.architectures import TransformerConfig
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.plan import Context, Pipe, Plan, Tensor
from weft.planner.lean_kernels import refuse_cache
from weft.planner.serving import MAX_RUNNING, ServingModel, ServingPrediction, ServingTimes, ServingWorkload
from weft.serve.attention.formats import cache_format
from weft.serve.parallel.rank_part import refuse_plan
from weft.serve.parallel.traffic import ServedSizes
from weft.serve.refusals import ServingCase, refuse
from weft.serve.spec import ServingSpec

ALONE_OUTPUT = 32  # tokens for which one request alone is predicted
LONG_SHARE = 0.1  # of the weights' bytes, that the cache of one request takes for which `context` is tried


def serving_plans(config: TransformerConfig, num_devices: int, with_context: bool = False) -> Iterable[Plan]:
    """Yields layouts over all devices: data, pipe, expert, x, and context if it is asked for."""
    sizes = ServedSizes.of(config)
    for x, context in product(_divisors(num_devices), _divisors(num_devices) if with_context else (1,)):
        for expert in _divisors(num_devices // (x * context)) if sizes.num_experts else (1,):
            for pipe in _divisors(num_devices // (x * context) // expert):
                data = num_devices // (x * context) // expert // pipe
                if pipe <= sizes.num_layers and data * pipe * expert * context * x == num_devices:
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
    is_long = longest * whole.cache_bytes(0) > LONG_SHARE * whole.weight_bytes
    for plan in serving_plans(config, cluster.num_devices, is_long and cache_format(spec.cache).kind == "plain"):
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
    refuse_plan(config, plan)
    without_drafts = replace(spec, speculate=None)  # drafts are priced for the best layout (`price_speculation`)
    refuse(ServingCase.of(without_drafts, plan=plan, cache=cache_format(spec.cache)))
    model = ServingModel(config, cluster, plan, precision, spec, has_codes)
    refuse_cache(model.kernels, cache_format(spec.cache))
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
    held = plan.data * min(MAX_RUNNING, int(cache_tokens / workload.mean_tokens))
    per_token = max(model.cache_bytes(stage) for stage in range(plan.pipe.degree))
    beside = max(model.bytes_beside_pages(stage) for stage in range(plan.pipe.degree))
    memory = math.ceil(model.weight_bytes + cache_tokens * per_token + beside)
    sizes = (model.weight_bytes, per_token, memory, cache_tokens, held)
    num_cached = max(longest, min(MAX_RUNNING, len(per_replica)) * workload.mean_tokens)
    return ServingPrediction(plan, *sizes, alone, every, model.streaming_price(num_cached), model.merged_bytes)


@lru_cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(value for value in range(1, number + 1) if number % value == 0)
