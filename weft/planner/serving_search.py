"""The search for the best layout in which to serve a model: all layouts over all devices are predicted."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from itertools import product

from weft.architectures import TransformerConfig
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.plan import Context, Pipe, Plan, Tensor
from weft.planner.serving import ServingModel, ServingPrediction, ServingWorkload, predict_serving
from weft.serve.cache.layer_cache import PlainFormat
from weft.serve.cache_formats import cache_format
from weft.serve.parallel.traffic import ServedSizes

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
    weights: str | None = None,
    cache: str | None = None,
    ahead: int = 0,
    resident: int = 0,
) -> tuple[list[ServingPrediction], list[str]]:
    """Returns the layouts that fit, most tokens per second first, and why others do not.

    `context` splits the cache alone, so it is tried where the cache of one request is much beside the weights, and only
    over plain caches, because others have no kernels for it.
    """
    found, refused = list[ServingPrediction](), list[str]()
    whole = ServingModel(config, cluster, Plan(), precision, weights, cache)
    longest = max(map(sum, workload.lengths))
    is_long = longest * whole.cache_bytes(0) > LONG_SHARE * whole.weight_bytes
    for plan in serving_plans(config, cluster.num_devices, is_long and isinstance(cache_format(cache), PlainFormat)):
        try:
            found.append(predict_serving(config, cluster, plan, workload, precision, weights, cache, ahead, resident))
        except PlanError as error:
            refused.append(str(error))
    return sorted(found, key=lambda one: -one.loaded.tokens_per_second), refused


@lru_cache
def _divisors(number: int) -> tuple[int, ...]:
    return tuple(value for value in range(1, number + 1) if number % value == 0)
