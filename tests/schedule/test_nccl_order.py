"""Messages in NCCL's order: no rank waits in a circle, whatever the schedule; with coarser groups some would."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import replace

import pipeline_for_tests as models
import pytest
from pipeline_for_tests import staged

from weft.comm import Axis, barrier
from weft.errors import PlanError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.pipeline.message_order import MessageDrivenOrder
from weft.pipeline.runtime import check_queues
from weft.plan import Pipe, Plan
from weft.schedule.actions import Edge, Message, Schedule, chain, with_messages
from weft.schedule.check import check
from weft.schedule.nccl_order import GroupOf, by_channel, check_nccl_order
from weft.schedule.schedules import SCHEDULES, make_schedule
from weft.schedule.shadow import with_shadows

pytestmark = pytest.mark.processes

Key = tuple[int, int, int, str]
ONE_QUEUE = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}


def with_skips(num_stages: int) -> tuple[Edge, ...]:
    """A chain, beside it a U-Net's edges across, and edges that skip one stage."""
    across = {(stage, num_stages - 1 - stage) for stage in range(num_stages)}
    skips = {(stage, stage + 2) for stage in range(num_stages - 2)}
    found = sorted((source, target) for source, target in across | skips if source + 1 < target)
    return *chain(num_stages), *(Edge(source, target, "skip") for source, target in found)


def all_options(name: str, ranks: int) -> list[dict[str, object]]:
    """Options that change a schedule's order."""
    return {
        "interleaved": [{"chunks": 2}, {"chunks": 3}],
        "gems": [{}, {"batches": 1}, {"batches": 2}],
        "message": [{}, {"in_flight": 1}, {"in_flight": 2 * ranks}],
    }.get(name, [{}])


def made(name: str, ranks: int, micro_batches: int, options: dict[str, object], skips: bool) -> Schedule | None:
    """A schedule with its messages; None where there is none of these sizes."""
    try:
        schedule = make_schedule(name, ranks, micro_batches, **options)
    except PlanError:
        return None
    return with_messages(schedule, with_skips(schedule.num_stages) if skips else None)


def group_by_way(message: Message) -> Hashable:
    """One group over the whole axis for each direction of the pipeline and way along the ranks."""
    source, target, direction = message.channel
    return direction, source < target


def forwards_only(schedule: Schedule) -> Schedule:
    """What an evaluation runs of the lists."""
    lists = (tuple(step for step in steps if step.kind.endswith("forward")) for steps in schedule.lists)
    return replace(schedule, lists=tuple(lists))


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("name", sorted(SCHEDULES))
@pytest.mark.sampled(2)
def test_no_schedule_deadlocks(name: str, skips: bool) -> None:
    """2 to 8 ranks, 1 to 16 micro-batches; up to 3 of them in an evaluation too."""
    count = 0
    for ranks in range(2, 9):
        for micro_batches in range(1, 17):
            options = all_options(name, ranks)
            for one in options if micro_batches <= 8 else options[:1]:
                schedule = made(name, ranks, micro_batches, one, skips)
                if schedule is None:
                    continue
                check_nccl_order(schedule)
                count += 1
                if micro_batches <= 3:
                    check_nccl_order(forwards_only(schedule))
    assert count >= 40


@pytest.mark.parametrize("ranks", [2, 3, 5])
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_shadows_do_not_deadlock(name: str, ranks: int) -> None:
    """What is left of a step after a loss is checked in test_shadow_lists.py."""
    for micro_batches in range(1, 9):
        check(with_messages(with_shadows(make_schedule(name, ranks, micro_batches))))


# --- the groups that weft had before: one for each direction and way along the axis


@pytest.mark.parametrize("ranks", [3, 4])
@pytest.mark.parametrize("micro_batches", [2, 3, 4, 8, 16])
def test_a_u_net_would_deadlock_with_groups_by_way(ranks: int, micro_batches: int) -> None:
    schedule = staged(models.UNet, Pipe(ranks)).schedule(micro_batches)  # which checks it
    with pytest.raises(PlanError, match=r"1f1b with . stages and .* deadlocks on NCCL.*waits for rank"):
        check(schedule, group_by_way)


@pytest.mark.parametrize("chunks", [2, 3])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(3, 1), (4, 1), (4, 2), (8, 4)])
def test_few_interleaved_micro_batches_would_deadlock_with_groups_by_way(
    ranks: int, micro_batches: int, chunks: int
) -> None:
    schedule = with_messages(make_schedule("interleaved", ranks, micro_batches, chunks=chunks))
    check(schedule)
    with pytest.raises(PlanError, match="interleaved"):
        check(schedule, group_by_way)


@pytest.mark.parametrize("ranks", [3, 4, 8])
def test_an_evaluation_would_deadlock_with_groups_by_way(ranks: int) -> None:
    forwards = forwards_only(with_messages(make_schedule("interleaved", ranks, 1)))
    assert {step.kind for step in forwards.lists[0]} == {"forward", "send_forward", "recv_forward"}
    check_nccl_order(forwards)
    with pytest.raises(PlanError, match="deadlocks"):
        check_nccl_order(forwards, group_by_way)


def test_the_cycle_is_named() -> None:
    schedule = with_messages(make_schedule("interleaved", 3, 1))
    with pytest.raises(PlanError) as error:
        check(schedule, group_by_way)
    ranks = re.findall(r"rank (\d)'s (?:send|recv)", str(error.value))
    assert len(set(ranks)) > 1
    operations = re.findall(r"rank \d's [a-z_]+ of micro-batch \d+ at stage \d+, edge \d+", str(error.value))
    assert operations[0] == operations[-1]


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "gems", "bidirectional"])
def test_plain_chains_were_clean(name: str) -> None:
    check(with_messages(make_schedule(name, 4, 8)), group_by_way)


# --- `message`: ranks choose their order as messages come


class BlockedError(Exception):
    """A rank that would wait."""


class DrivenRank:
    """A rank of `message` that decides by what has completed in NCCL's order."""

    def __init__(self, ranks: DrivenRanks, index: int) -> None:
        self.ranks, self.index, self.has_ended = ranks, index, False
        self.order = MessageDrivenOrder(ranks.schedule, index, self, self.post)  # type: ignore[arg-type]

    def post(self, message: Message) -> None:
        self.ranks.issue(self.index, message)

    def expect(self, _: Message) -> None: ...

    def have(self, keys: Collection[Key]) -> bool:
        return self.ranks.complete.issuperset(keys)

    def wait_for_one(self, _: Sequence[Collection[Key]]) -> None:
        raise BlockedError

    def go_on(self) -> bool:
        """Do an action, or post a receive; whether anything was done."""
        issued = self.ranks.num_issued
        try:
            action = self.order.next()
        except BlockedError:
            return self.ranks.num_issued > issued
        if action is None:
            self.has_ended = True
            return True
        for message in self.ranks.schedule.messages(action)[1]:
            self.ranks.issue(self.index, message)
        return True


class DrivenRanks:
    """All ranks of a `message` schedule; what happens next is drawn."""

    def __init__(self, schedule: Schedule, group_of: GroupOf, seed: int) -> None:
        self.schedule, self.group_of, self.rng = schedule, group_of, random.Random(seed)
        self.queues: dict[tuple[int, Hashable], list[Key]] = defaultdict(list)
        self.complete: set[Key] = set()
        self.num_issued = self.most_waiting = 0
        self.ranks = [DrivenRank(self, index) for index in range(schedule.num_ranks)]

    def issue(self, rank: int, message: Message) -> None:
        queue = self.queues[rank, self.group_of(message)]
        queue.append(message.key)
        self.num_issued += 1
        if not message.is_send:
            self.most_waiting = max(self.most_waiting, len(queue))

    def finish(self) -> bool:
        """Run all to the end; False where nothing can move before."""
        while self._move():
            pass
        return all(rank.has_ended for rank in self.ranks) and not any(self.queues.values())

    def _move(self) -> bool:
        heads: dict[Key, list[list[Key]]] = defaultdict(list)
        for queue in self.queues.values():
            if queue:
                heads[queue[0]].append(queue)
        events = [key for key, ends in heads.items() if len(ends) == 2]
        choices: list[Key | DrivenRank] = [*events, *(rank for rank in self.ranks if not rank.has_ended)]
        self.rng.shuffle(choices)
        for choice in choices:
            if isinstance(choice, DrivenRank):
                if choice.go_on():
                    return True
                continue
            self.complete.add(choice)
            for queue in heads[choice]:
                del queue[0]
            return True
        return False


def driven(ranks: int, micro_batches: int, in_flight: int | None, skips: bool) -> Schedule:
    schedule = make_schedule("message", ranks, micro_batches, in_flight=in_flight)
    return with_messages(schedule, with_skips(ranks) if skips else None)


@pytest.mark.parametrize("skips", [False, True])
@pytest.mark.parametrize("in_flight", [None, 1, 2])
@pytest.mark.parametrize("ranks", [2, 3, 4, 6])
def test_ranks_that_choose_their_order_do_not_deadlock(ranks: int, in_flight: int | None, skips: bool) -> None:
    for micro_batches in (1, 2, 3, 8):
        for seed in range(4):
            run = DrivenRanks(driven(ranks, micro_batches, in_flight, skips), by_channel, seed)
            assert run.finish()
            assert skips or run.most_waiting == 1  # a receive never waits behind another


@pytest.mark.parametrize("skips", [False, True])
def test_ranks_that_choose_their_order_would_deadlock_with_groups_by_way(skips: bool) -> None:
    runs = [DrivenRanks(driven(4, 8, None, skips), group_by_way, seed) for seed in range(4)]
    assert not any(run.finish() for run in runs)


# --- one hardware queue


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "gems", "bidirectional"])
def test_chains_complete_with_one_queue(name: str) -> None:
    for ranks in (2, 4, 6):
        for micro_batches in (1, 2, 4, 7, 12):
            schedule = made(name, ranks, micro_batches, {}, skips=False)
            if schedule is not None:
                check_queues(schedule, ONE_QUEUE)


def test_lists_that_need_more_queues_are_refused_where_there_is_one() -> None:
    schedule = with_messages(make_schedule("1f1b", 6, 6), with_skips(6))
    check_queues(schedule, {})
    check_queues(schedule, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})
    with pytest.raises(PlanError, match=r"CUDA_DEVICE_MAX_CONNECTIONS=1 .* waits for .* export CUDA_DEVICE_MAX"):
        check_queues(schedule, ONE_QUEUE)
    with pytest.raises(PlanError, match="'message' posts receives in no fixed order"):
        check_queues(with_messages(make_schedule("message", 2, 2)), ONE_QUEUE)


def test_more_channels_than_streams_are_refused() -> None:
    dense = [Edge(source, target, "all") for target in range(14) for source in range(target)]
    check_queues(with_messages(make_schedule("1f1b", 13, 2), [edge for edge in dense if edge.target < 13]), {})
    with pytest.raises(PlanError, match="pipe rank 0 has 26 channels"):
        check_queues(with_messages(make_schedule("1f1b", 14, 2), dense), {})


# --- groups


def test_every_channel_has_a_group_of_two() -> None:
    schedule = with_messages(make_schedule("interleaved", 3, 2), with_skips(6))
    assert {channel[:2] for channel in schedule.channels} == {(a, b) for a in range(3) for b in range(3) if a != b}
    one_way = with_messages(make_schedule("gpipe", 2, 1), [Edge(0, 1, "mask", backward=False)])
    assert one_way.channels == ((0, 1, "forward"),)

    def rank(_: int) -> list[object]:
        mesh = Mesh(Plan(pipe=Pipe(3)))
        pairs = [mesh.pair("pipe", *channel) for channel in schedule.channels]
        again = [mesh.pair("pipe", *channel) for channel in schedule.channels]
        barrier()
        own = [axis for axis in pairs if axis is not None]
        assert [axis.group for axis in own] == [axis.group for axis in again if axis is not None]
        assert len({id(axis.group) for axis in own}) == len(own)
        return [len(own), sorted({(axis.name, axis.degree) for axis in own}), [index(axis) for axis in pairs]]

    def index(axis: Axis | None) -> int:
        return -1 if axis is None else axis.index

    found = run_local(rank, 3)
    for place, (source, target, _) in enumerate(schedule.channels):
        indices = [found[index][2][place] for index in range(3)]
        assert (indices[min(source, target)], indices[max(source, target)]) == (0, 1)
        assert sorted(indices) == [-1, 0, 1]
    assert [one[:2] for one in found] == [[8, [["pipe", 2]]]] * 3
