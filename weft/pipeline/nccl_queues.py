"""A check of CUDA's hardware queues: pipelines whose streams could block each other are refused."""

from __future__ import annotations

from collections.abc import Mapping

from weft.comm.backends import MOST_QUEUES, QUEUES_VARIABLE
from weft.errors import PlanError
from weft.schedule.actions import Schedule
from weft.schedule.nccl_order import check_nccl_order

_NUM_STREAMS = 32  # torch takes streams of groups from a pool in turn; groups with one stream share an order
MAX_CHANNELS = 24  # per rank; the other streams are for the other axes


def check_queues(schedule: Schedule, environ: Mapping[str, str]) -> None:
    """Raise a PlanError if the streams of a rank's channels could block each other on this machine's GPUs."""
    for rank in range(schedule.num_ranks):
        count = sum(rank in channel[:2] for channel in schedule.channels)
        if count > MAX_CHANNELS:
            raise PlanError(
                f"pipe rank {rank} has {count} channels to other ranks, each with a CUDA stream; torch has "
                f"{_NUM_STREAMS} streams for all groups of a rank, so use at most {MAX_CHANNELS} channels: fewer ranks "
                f"of pipe, or other stages (pipe.split), so that fewer stages exchange tensors"
            )
    if environ.get(QUEUES_VARIABLE) != "1":
        return
    reason = None
    try:
        check_nccl_order(schedule, one_queue=True)
    except PlanError as error:
        reason = str(error)
    if schedule.name == "message":
        reason = "pipe.schedule = 'message' posts receives in no fixed order"
    if reason is not None:
        raise PlanError(
            f"{QUEUES_VARIABLE}=1 makes a GPU start all operations in one order, in which this pipeline can wait for "
            f"ever: {reason}; export {QUEUES_VARIABLE}={MOST_QUEUES}"
        )
