"""A language model for the planner. Two blocks are profiled, and the last is counted once for each layer.

All blocks of weft's language models are equal, so a model of a trillion parameters takes as long to profile as a small
one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from weft.cluster.hardware import Cluster
from weft.compile.saved_bytes import compiled_profile
from weft.errors import PlanError
from weft.models import DecoderConfig, LanguageConfig, build
from weft.models.loss import ExampleLoss
from weft.models.loss_head import install_loss_head
from weft.plan import Plan, Precision
from weft.planner.closed_form_memory import sizes
from weft.planner.search import Model
from weft.planner.stage_units import ModelUnits
from weft.planner.step import StepModel
from weft.profiling import Profile, profile
from weft.profiling.software import Software, software_for_text
from weft.profiling.workload import Workload, workload
from weft.sharding.layout import COMPUTE_DTYPE

NUM_PROFILED = 2


class TracedModel(NamedTuple):
    """What the planner needs of a model and its software, on any cluster."""

    profile: Profile
    workload: Workload
    numel: tuple[int, int, int]  # parameters of the first end, one block, the last end
    tied_numel: int
    expert_numel: int
    units: ModelUnits | None


def software_of(config: LanguageConfig, cluster: Cluster, compiles: bool | None = None) -> Software:
    """How weft trains a language model on a cluster. `compiles` is the run's setting; None compiles what can be on
    GPUs.
    """
    return software_for_text(cluster, compiles if config.is_compiled else False)


@lru_cache(maxsize=8)
def planned_model(
    config: LanguageConfig,
    sequence: int,
    cluster: Cluster,
    software: Software | None = None,
    precision: Precision = "bf16",
) -> Model:
    """Returns the model for sequences of `sequence` tokens on a cluster.

    `software` defaults to how weft itself trains. Activations are those of plans in `precision`.
    """
    if isinstance(config, DecoderConfig) and len(set(config.num_experts_per_layer)) > 1:
        raise PlanError(
            f"num_experts_per_layer = {list(config.num_experts_per_layer)} gives layers different numbers of experts, "
            f"and weft plans models whose layers are equal; give a plan, or use num_experts"
        )
    software = software or software_of(config, cluster)
    found = _traced(config, sequence, precision, software.compiled, software.equal_stages)
    steps = StepModel(found.workload, cluster, software, found.numel, found.tied_numel, found.units, found.expert_numel)
    return Model(steps, found.profile)


@lru_cache(maxsize=8)
def _traced(
    config: LanguageConfig, sequence: int, precision: Precision, is_compiled: bool, equal_stages: bool
) -> TracedModel:
    """Profiles a model. The result does not depend on the cluster, so questions about several clusters share it."""
    shallow = config.with_layers(NUM_PROFILED)
    found, in_head = _profiled(shallow, sequence, precision, False), _profiled(shallow, sequence, precision, True)
    if not config.is_compiled:  # gradients that recurrent layers add up token by token do not grow with the batch
        found, in_head = (
            replace(one, of_two=_profiled(shallow, sequence, precision, is_in_head, 2))
            for one, is_in_head in ((found, False), (in_head, True))
        )
    units = None if equal_stages else ModelUnits((found, in_head), config.num_layers)
    if is_compiled:
        found, in_head = compiled_profile(found), compiled_profile(in_head)
    found = replace(found, in_head=in_head)
    work = workload(found)
    work = replace(work, blocks=(work.blocks[-1],) * config.num_layers)
    held = sizes(found, Plan())
    numel = (int(held.first_numel), found.blocks[-1].numel, int(held.last_numel))
    experts = sum(one.numel * one.num_experts for one in found.blocks[-1].experts)
    return TracedModel(found, work, numel, int(held.tied_numel), experts, units)


@lru_cache(maxsize=16)
def _profiled(
    shallow: LanguageConfig, sequence: int, precision: Precision, in_head: bool, num_sequences: int = 1
) -> Profile:
    """The profile of a model with few layers, with the loss computed in its head or from its logits."""

    def tokens() -> Tensor:
        return torch.zeros(num_sequences, sequence, dtype=torch.long, device="cpu")

    with torch.device("meta"):
        module = build(shallow).to(COMPUTE_DTYPE[precision])
    if in_head:
        install_loss_head(module)
    return profile(module, lambda: (tokens(),), ExampleLoss(tokens))
