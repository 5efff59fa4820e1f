"""Predicts speculative decoding of one request (`serve/scheduling/speculation.py`): drafts are checked by one step of
the model.

The chance of a draft to be accepted is given, as only the text and the drafter decide it. With a chance of a and g
drafts, a step gives 1 + a + ... + a^g tokens on average. The engine drafts one token more while that pays, so the
number of drafts with the highest rate is taken. Tokens are read before the next step is launched, so what the host
does in between is added to the device's time. A draft model costs its own decodes, with its weights as its folder has
them; the folder needs no weights to be priced.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from weft.architectures import RecurrentConfig
from weft.errors import ConfigError
from weft.plan import Plan
from weft.planner.serving import HOST_SECONDS, OPERATIONS_PER_LAYER, ServingModel
from weft.serve.loading import model_config
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.scheduling.speculation import LAYERS, MAX_DRAFTS, early_layers
from weft.serve.spec import ServingSpec
from weft.serve.weights.folder_codes import folder_format

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
    of_draft = _draft_seconds(model, kind, length)
    found = []
    for number in range(MAX_DRAFTS + 1):
        tokens = sum(chance**index for index in range(number + 1))
        seconds = model.draft_check_seconds(number, length) + HOST_STEP_SECONDS
        seconds += number * of_draft
        found.append(SpeculationPrice(kind, chance, number, tokens, tokens / seconds, without))
    return max(found, key=lambda one: one.tokens_per_second)


def _draft_seconds(model: ServingModel, kind: str, length: int) -> float:
    """Seconds of one draft. It is not a CUDA graph, so the host's calls may take longer than the device."""
    if kind == "ngram":
        return 0.0  # a lookup, in the host's time of the step
    if kind.startswith(LAYERS):
        number, whole = early_layers(kind).number, model.sizes.num_layers
        if not 1 <= number < whole:
            raise ConfigError(f"--speculate {kind}: drafts need at least 1 layer, and fewer than the model's {whole}")
        seconds = model.decode_seconds(length, number)
    else:
        draft = _draft_model(model, kind, length)
        number, seconds = draft.sizes.num_layers, draft.decode_seconds(length)
    return max(HOST_STEP_SECONDS + OPERATIONS_PER_LAYER * number * HOST_SECONDS, seconds)


def _draft_model(model: ServingModel, kind: str, length: int) -> ServingModel:
    """The model in a folder, which lies on the device beside the model that it drafts for, with a cache of its own."""
    folder = Path(kind)
    if not folder.is_dir():
        raise ConfigError(
            f"--speculate {kind} is no folder; give ngram, layers=K, or the folder of a smaller model (its config.json "
            f"is enough)"
        )
    config = model_config(folder)
    refuse(ServingCase({"speculate": kind}, draft=kind_of(config)))
    assert not isinstance(config, RecurrentConfig)
    spec = ServingSpec(weights=folder_format(folder))
    draft = ServingModel(config, model.cluster, Plan(), model.kernels.precision, spec, has_codes=True)
    held = model.weight_bytes + draft.weight_bytes + length * (model.cache_bytes(0) + draft.cache_bytes(0))
    memory_bytes = model.cluster.node.device.memory_bytes
    if held > memory_bytes:
        raise ConfigError(
            f"--speculate {kind}: both models and a text of {length} tokens take {held / 1e9:.1f} GB, and a device has "
            f"{memory_bytes / 1e9:.0f}; give a smaller draft model, or --weights for fewer bits"
        )
    return draft
