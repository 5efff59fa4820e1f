"""The stages that a run cuts a language model into, without the whole model: its first blocks stand for all."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, NamedTuple

from weft.models.loss_head import is_loss_in_head
from weft.pipeline.build import stage_weights
from weft.pipeline.partition import assign
from weft.plan import Plan
from weft.profiling import Profile


class StageUnits(NamedTuple):
    """The number of blocks of a stage, or of a pipeline rank, and which ends of the model it has.

    `num_recomputed` of its blocks are recomputed; it is counted only if other stages save everything.
    """

    num_blocks: int
    has_first: bool
    has_last: bool
    num_recomputed: int = 0


class UnitSeconds(NamedTuple):
    """Seconds of one micro-batch in the first end of the model, in one block, in the last end, and in a recomputed
    block.
    """

    first: float
    block: float
    last: float
    recomputed: float


@dataclass(frozen=True)
class ModelUnits:
    """The units of a model of equal blocks. `profiles` are of its first blocks, for one sequence: (loss from logits,
    loss in the head).
    """

    profiles: tuple[Profile, Profile]
    num_blocks: int

    @cached_property
    def _stages(self) -> dict[Any, tuple[StageUnits, ...]]:
        return {}

    def stages(self, plan: Plan) -> tuple[StageUnits, ...]:
        """The plan's stages, by the same rule as a run's."""
        pipe = plan.pipe
        key: tuple[Any, ...] = (pipe.num_stages, pipe.split, pipe.balance, plan.memory.recompute_stages)
        if pipe.balance == "memory":
            key = (*key, plan.micro_batch, is_loss_in_head(plan))
        if pipe.balance == "memory" or plan.memory.recompute_stages is not None:
            key = (*key, plan.memory.recompute)
        if key not in self._stages:
            self._stages[key] = self._assigned(plan)
        return self._stages[key]

    @cached_property
    def block_names(self) -> list[str]:
        """The names of all blocks of the model."""
        name = self.profiles[0].blocks[-1].name
        return [f"{name.rpartition('.')[0]}.{index}" for index in range(self.num_blocks)]

    def split(self, counts: Sequence[int]) -> tuple[str, ...]:
        """`pipe.split` for stages of these numbers of blocks: the block that begins each stage but the first."""
        return tuple(self.block_names[begin] for begin in accumulate(counts[:-1]))

    def _assigned(self, plan: Plan) -> tuple[StageUnits, ...]:
        profile = self.profiles[is_loss_in_head(plan)]
        weights = stage_weights(profile, plan, plan.micro_batch or 1)
        names, blocks = [block.name for block in profile.blocks], self.block_names
        called = list(profile.units)
        first, last = called.index(names[0]), called.index(names[-1])
        order = [*called[:first], *blocks, *called[last + 1 :]]
        distinct = {id(own): {**dict.fromkeys(blocks, own[names[-1]]), **own} for own in weights}
        found = assign(order, set(blocks), [distinct[id(own)] for own in weights], plan.pipe)
        counts = [0] * plan.pipe.num_stages
        for block in blocks:
            counts[found[block]] += 1
        stages = [
            StageUnits(count, index == found[order[0]], index == found[order[-1]]) for index, count in enumerate(counts)
        ]
        return with_recompute(stages, plan.memory.recompute_stages)


def with_recompute(stages: Sequence[StageUnits], count: int | None) -> tuple[StageUnits, ...]:
    """Returns the stages with the blocks of the first `count` of them marked as recomputed."""
    return tuple(
        one._replace(num_recomputed=one.num_blocks if count is not None and index < count else 0)
        for index, one in enumerate(stages)
    )


@lru_cache(maxsize=1 << 10)
def equal_stages(num_blocks: int, num_stages: int, recompute_stages: int | None = None) -> tuple[StageUnits, ...]:
    """Stages of equal numbers of blocks, the remainder spread over them."""
    bounds = [-(-index * num_blocks // num_stages) for index in range(num_stages + 1)]
    stages = [
        StageUnits(bounds[index + 1] - bounds[index], index == 0, index == num_stages - 1)
        for index in range(num_stages)
    ]
    return with_recompute(stages, recompute_stages)
