"""What weights in host memory cost when a model is served: bytes on the device, copies and gathers of each step.

Each device is assumed to read host memory over a link of its own. Copies and gathers go on at the same time, beside the
computation, so the slowest of the three is the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.architectures import LanguageConfig
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.planner.step import HOST_LINK_SHARE
from weft.serve.rank_part import RankPlace, block_bytes
from weft.serve.streamed_traffic import pass_calls, streamed_bytes
from weft.serve.weight_formats import WeightFormat

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


@dataclass(frozen=True)
class StreamingPrice:
    """What weights in host memory cost: bytes of a step that a device copies, and that replicas gather; the seconds of
    both; and with how many tokens of a step its products take as long.
    """

    copied_bytes: int
    gathered_bytes: int
    copy_seconds: float
    break_even_tokens: int


@dataclass(frozen=True)
class StreamedStage:
    """The weights in host memory of a rank: what a step copies and gathers, in bytes and seconds. The rank's device
    holds `saved_bytes` less than all its weights; `floor_seconds` is what the link takes at its printed rate.
    """

    copied_bytes: int
    gathered_bytes: int
    saved_bytes: int
    seconds: float
    floor_seconds: float


def streamed_stage(
    config: LanguageConfig,
    cluster: Cluster,
    place: RankPlace,
    item_bytes: int,
    format: WeightFormat | None,
    ahead: int,
    call_seconds: Callable[[str, str, int], float],
) -> StreamedStage:
    """Price the rank at a place. `call_seconds` gives the time of (axis, operation, bytes). Raises PlanError."""
    rate = cluster.node.host_link_bytes_per_second
    if rate is None:
        raise PlanError(
            "the cluster's file does not say how fast devices read host memory, which --stream-weights needs; give "
            "node.host_link_bytes_per_second"
        )
    blocks = streamed_bytes(config, place, _DTYPES[item_bytes], format)
    num_places, num_readers = min(ahead + 1, len(blocks)), place.plan.data
    saved = sum(block_bytes(config, place, item_bytes, format)) - num_places * max(blocks)
    if num_places == len(blocks):  # all stay on the device
        return StreamedStage(0, 0, saved, 0.0, 0.0)
    copied = sum(blocks) // num_readers
    calls = list(pass_calls(blocks, num_readers, ahead))
    gathers = sum(call_seconds(*key, size) for key, size in calls)
    seconds = max(copied / (rate * HOST_LINK_SHARE), gathers)
    return StreamedStage(copied, sum(size for _, size in calls), saved, seconds, copied / rate)
