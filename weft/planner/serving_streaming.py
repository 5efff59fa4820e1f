"""What weights in host memory cost when a model is served: bytes on the device, copies and gathers of each step.

Each device is assumed to read host memory over a link of its own. Copies and gathers go on at the same time, beside the
computation, so the slowest of the three is the time of a step.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from weft.architectures import TransformerConfig
from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.planner.step import HOST_LINK_SHARE
from weft.serve.model.streamed_traffic import all_block_bytes, copied_bytes, pass_calls
from weft.serve.parallel.rank_part import RankPlace, block_bytes
from weft.serve.spec import EngineSizes
from weft.serve.weights.streamed_layout import streamed_numbers
from weft.serve.weights.streamed_weights import refuse_resident
from weft.serve.weights.weight_formats import WeightFormat
from weft.sharding.host_memory import KEPT_FREE_BYTES

_DTYPES = {2: torch.bfloat16, 4: torch.float32}


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
class StreamedStage:
    """The weights in host memory of a rank: what a step copies and gathers, in bytes and seconds. The rank's device
    holds `saved_bytes` less than all its weights, among them the `resident_bytes` of blocks that are not streamed;
    `floor_seconds` is what the link takes at its printed rate.
    """

    copied_bytes: int
    gathered_bytes: int
    saved_bytes: int
    resident_bytes: int
    host_bytes: int
    block_bytes: tuple[int, ...]
    num_resident: int
    num_places: int
    seconds: float
    floor_seconds: float

    def fitting_blocks(self, num_bytes: float) -> int:
        """How many blocks could stay on the device if resident ones had so many bytes there. All of them, if those
        that are left fill the places of streamed ones.
        """
        number = max(0, int(num_bytes // max(self.block_bytes)))
        return len(self.block_bytes) if number >= len(self.block_bytes) - self.num_places else number


def streamed_stage(
    config: TransformerConfig,
    cluster: Cluster,
    place: RankPlace,
    item_bytes: int,
    format: WeightFormat | None,
    options: EngineSizes,
    call_seconds: Callable[[str, str, int], float],
    with_experts: bool = True,
) -> StreamedStage:
    """Price the rank at a place. `call_seconds` gives the time of (axis, operation, bytes). `with_experts`: the format
    is that of experts too. Raises PlanError.
    """
    rate = cluster.node.host_link_bytes_per_second
    if rate is None:
        raise PlanError(
            "the cluster's file does not say how fast devices read host memory, which --stream-weights needs; give "
            "node.host_link_bytes_per_second"
        )
    blocks = all_block_bytes(config, place, _DTYPES[item_bytes], format, with_experts)
    ahead, num_resident = options.stream_weights, options.resident_blocks
    refuse_resident(num_resident, len(blocks))
    streamed = [blocks[number] for number in streamed_numbers(len(blocks), num_resident)]
    num_places, num_readers = min(ahead + 1, len(streamed)), place.plan.data
    resident_bytes, host_bytes = sum(blocks) - sum(streamed), sum(streamed) // num_readers
    _refuse_host(host_bytes, min(place.plan.num_ranks, cluster.node.num_devices), cluster)
    whole = sum(block_bytes(config, place, item_bytes, format, with_experts))
    saved = whole - num_places * max(streamed) - resident_bytes
    sizes = (saved, resident_bytes, host_bytes, blocks, num_resident, num_places)
    copied = sum(copied_bytes(streamed, ahead)) // num_readers
    calls = list(pass_calls(streamed, num_readers, ahead))
    gathers = sum(call_seconds(*key, size) for key, size in calls)
    seconds = max(copied / (rate * HOST_LINK_SHARE), gathers)
    return StreamedStage(copied, sum(size for _, size in calls), *sizes, seconds, copied / rate)


def _refuse_host(host_bytes: int, num_devices: int, cluster: Cluster) -> None:
    """Raise PlanError if the host of a node has not enough memory for streamed blocks of its devices."""
    if host_bytes * num_devices > cluster.node.host_memory_bytes - KEPT_FREE_BYTES:
        raise PlanError(
            f"{host_bytes / 1e9:.1f} GB of streamed weights for each of {num_devices} devices of a node do not fit its "
            f"{cluster.node.host_memory_bytes / 1e9:.0f} GB of host memory; raise --resident-blocks, or keep weights "
            f"in fewer bits (--weights)"
        )
