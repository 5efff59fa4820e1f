"""An image model for the planner: profiled for one image, and for tiles of it when the search asks for them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster
from weft.compile.saved_bytes import needs_pieces
from weft.data.config import ImageShape
from weft.inspection.blocks import find_blocks
from weft.memory.offload_activations import offloadable_storages, offloaded_blocks
from weft.models import VisionConfig, build
from weft.plan import Plan
from weft.planner.closed_form_memory import RankMemory
from weft.planner.common_costs import CommonCosts
from weft.planner.image_search import ImageSearch
from weft.planner.image_sections import ImageSections
from weft.planner.image_step import ImageSteps
from weft.planner.question import Question
from weft.planner.search import Model, Search
from weft.profiling import profile
from weft.profiling.software import Software
from weft.profiling.workload import Workload
from weft.sharding.layout import COMPUTE_DTYPE

COMPILED = Software(fused=True, compiled=True)  # tiles run uncompiled
IN_PIECES = Software(compiled=True)  # saves what compiled blocks save, takes as long as uncompiled


def software_for_images(config: VisionConfig, cluster: Cluster, compiles: bool | None = None) -> Software:
    """How weft trains an image model on a cluster: compiled or not.

    `compiles` is the run's setting; None compiles on GPUs. Blocks that are compiled in pieces count as uncompiled on a
    CPU.
    """
    with torch.device("meta"):
        has_pieces = needs_pieces(find_blocks(build(config)).values())
    if compiles is None:
        compiles = not is_cpu(cluster)
    if not compiles or (has_pieces and is_cpu(cluster)):
        return Software(overlaps=not is_cpu(cluster))
    return replace(IN_PIECES if has_pieces else COMPILED, overlaps=not is_cpu(cluster))


@dataclass(frozen=True)
class ImageModel(Model):
    """An image model to plan. The profile is of one image, with all blocks."""

    steps: ImageSteps

    @property
    def numel(self) -> int:
        """The number of parameters of the whole model."""
        return self.profile.numel

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward for one image, without recompute."""
        return float(self.profile.flops + self.profile.backward_flops)

    def held(self, plan: Plan, num_micro_batches: int) -> RankMemory:
        """Memory of the rank that needs most."""
        return self.steps.held(plan, num_micro_batches)

    def _sent_bytes(self, plan: Plan) -> float:
        places = offloaded_blocks(len(self.profile.blocks), plan.memory.activations)
        stored = (offloadable_storages(self.profile.blocks[place], plan) for place in places)
        return (plan.micro_batch or 1) * sum(sum(one.values()) for one in stored) / plan.tile.degree

    def common(self, plan: Plan, num_micro_batches: int) -> CommonCosts:
        """The costs of plans that differ only in data, shard and offloaded state. Each plan is computed anew."""
        return CommonCosts(plan, num_micro_batches, self.steps, self.held)

    def seeker(self, question: Question, keep: int) -> Search:
        """Returns the search over plans for this model."""
        return ImageSearch(self, question, keep)


def planned_images(
    config: VisionConfig, shape: ImageShape, precision: str, cluster: Cluster, software: Software | None = None
) -> ImageModel:
    """Returns the model for images of a shape on a cluster. Without `software`, blocks are not compiled."""
    sections = _sections(config, shape, precision)
    parts = [section.part for section in sections.whole]
    work = Workload(parts[0], tuple(parts[1:-1]), parts[-1], sections.profile.stream_numel)
    return ImageModel(ImageSteps(work, cluster, software or Software(), sections=sections), sections.profile)


@lru_cache(maxsize=8)
def _sections(config: VisionConfig, shape: ImageShape, precision: str) -> ImageSections:
    with torch.device("meta"):
        module = build(config)

    def example() -> tuple[Tensor]:
        return (torch.zeros(1, shape.channels, shape.height, shape.width, device="cpu"),)

    return ImageSections(profile(module, example, None, COMPUTE_DTYPE[precision]))  # type: ignore[index]
