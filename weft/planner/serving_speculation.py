"""Predicts speculative decoding of one request (`serve/scheduling/speculation.py`): drafts are checked by one step of
the model.

The chance of a draft to be accepted is given, as only the text and the drafter decide it. With a chance of a and g
drafts, a step gives 1 + a + ... + a^g tokens on average. The engine drafts one token more while that pays, so the
number of drafts with the highest rate is taken. Tokens are read before the next step is launched, so what the host
does in between is added to the device's time. A draft model costs its own decodes, with its weights as its folder has
them; the folder needs no weights to be priced.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from weft.errors import ConfigError
from weft.planner.serving import HOST_SECONDS, OPERATIONS_PER_LAYER, ServingModel

# What the host does for a step that is replayed as a CUDA graph takes 1.3 ms: of a decode of 4.35 ms without drafts,
# the host of an H200 waited for 3.0 (benchmarks/serve_profile.py). The device waits for the half before the launch:
# read, schedule, copy inputs. What follows, sampling, is launched while the device computes. A round of drafts, which
# is no graph, has about as much beside its layers: inputs and sampling. That it is a half is found on both kinds of
# drafts together, on an H200.
HOST_STEP_SECONDS = 1.3e-3 / 2


@dataclass(frozen=True)
class SpeculationPrice:
    """What drafts give one request: how many for a step, tokens of a step, and tokens a second with and without."""

    kind: str
    chance: float  # of a draft to be accepted
    num_drafts: int
    tokens_per_step: float
    tokens_per_second: float
    tokens_per_second_without: float

    @property
    def times_as_fast(self) -> float:
        return self.tokens_per_second / self.tokens_per_second_without


def price_speculation(model: ServingModel, kind: str, chance: float, length: int) -> SpeculationPrice:
    """Price drafts for one request that has `length` tokens. `kind` is that of `weft serve --speculate`.

    Raises ConfigError for kinds that are not priced.
    """
    if not 0 <= chance <= 1:
        raise ConfigError(f"--accepted {chance} must be the share of drafts that are accepted, from 0 to 1")
    if model.plan.num_ranks > 1:
        raise ConfigError("--speculate is priced on one device; plan for one, as --cluster h200:1x1")
    without = 1 / model.decode_seconds(length)
    of_draft, most = _draft_seconds(model, kind, length)
    found = []
    for number in range(most + 1):
        tokens = sum(chance**index for index in range(number + 1))
        seconds = model.draft_check_seconds(number, length) + HOST_STEP_SECONDS
        seconds += number * of_draft
        found.append(SpeculationPrice(kind, chance, number, tokens, tokens / seconds, without))
    return max(found, key=lambda one: one.tokens_per_second)


def _draft_seconds(model: ServingModel, kind: str, length: int) -> tuple[float, int]:
    """Return the seconds of one draft, and the most drafts of a step. A draft is not a CUDA graph, so the host's calls
    may take longer than the device. A draft model lies on the device beside the model that it drafts for, with a cache
    of its own.
    """
    draft, most = model.costs.draft(kind)
    if not draft.num_layers:
        return 0.0, most  # a lookup, in the host's time of the step
    seconds = model.decode_seconds(length, draft.num_layers)
    if draft.given is not None:
        own = ServingModel(draft.given[0], model.cluster, model.plan, model.kernels.precision, *draft.given[1:])
        seconds = own.decode_seconds(length)
        held = model.weight_bytes + own.weight_bytes
        held += math.ceil(length * (model.costs.cache_bytes(0) + own.costs.cache_bytes(0)))
        memory_bytes = model.cluster.node.device.memory_bytes
        if held > memory_bytes:
            raise ConfigError(
                f"--speculate {kind}: both models and a text of {length} tokens take {held / 1e9:.1f} GB, and a device "
                f"has {memory_bytes / 1e9:.0f}; give a smaller draft model, or --weights for fewer bits"
            )
    return max(HOST_STEP_SECONDS + OPERATIONS_PER_LAYER * draft.num_layers * HOST_SECONDS, seconds), most
