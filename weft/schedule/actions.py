"""Actions and messages of a pipeline's ranks, as plain tuples to be checked, simulated, drawn, merged and run.

A schedule is one list of actions per rank. Schedules list computation only; `with_messages` derives the point-to-point
messages from the edges between stages, one message per edge, micro-batch and direction. An edge may skip stages
(HyPar-Flow, arXiv 1911.05146): its tensor is sent directly to the rank that uses it.

A rank runs its list in order. A receive is *posted* at its position and does not block; the computation that needs it
waits for it. A send starts right after the computation that made its tensor and does not block. A `Channel` is (sender,
receiver, direction). Its receives are posted in the order of its sends, so messages that arrive in order need no tags.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from weft.errors import PlanError

COMPUTE_KINDS = ("forward", "backward", "weight")
SHADOW = "shadow"  # a forward of the next rank's stage, in case that rank is lost; see `shadow.py`
MESSAGE_KINDS = ("send_forward", "recv_forward", "send_backward", "recv_backward")


class Action(NamedTuple):
    """One computation of one micro-batch at one stage.

    A backward computes the gradients of inputs and weights. If a `weight` action of the same stage and micro-batch
    follows, the backward computes only those of the inputs. Micro-batches are numbered over all replicas.
    """

    kind: str
    stage: int
    micro_batch: int
    replica: int = 0

    def __str__(self) -> str:
        copy = f" of replica {self.replica}" if self.replica else ""
        return f"{self.kind} of micro-batch {self.micro_batch} at stage {self.stage}{copy}"


class Channel(NamedTuple):
    """The messages from one rank to another in one direction of the pipeline ("forward" or "backward")."""

    source: int
    target: int
    direction: str


class Message(NamedTuple):
    """One end of a message: `stage` is that of the rank at this end, and `edge` an index into the edges."""

    kind: str
    stage: int
    micro_batch: int
    replica: int
    channel: Channel
    edge: int

    @property
    def is_send(self) -> bool:
        return self.kind.startswith("send")

    @property
    def direction(self) -> str:
        return self.channel.direction

    @property
    def peer(self) -> int:
        """The rank at the other end."""
        return self.channel.target if self.is_send else self.channel.source

    @property
    def key(self) -> tuple[int, int, int, str]:
        """The same for the send and the receive of one message, and different for all others."""
        return self.edge, self.micro_batch, self.replica, self.direction

    def __str__(self) -> str:
        copy = f" of replica {self.replica}" if self.replica else ""
        where = f"stage {self.stage}{copy}, edge {self.edge}, peer rank {self.peer}"
        return f"{self.kind} of micro-batch {self.micro_batch} at {where}"


class Edge(NamedTuple):
    """A tensor that stage `target` takes from the earlier stage `source`. `backward`: its gradient is sent back."""

    source: int
    target: int
    name: str
    backward: bool = True


class Need(NamedTuple):
    """An action that must run first, and the edge that carries its result (None within a stage)."""

    action: Action
    edge: int | None


Steps = tuple[Action | Message, ...]


def chain(num_stages: int) -> tuple[Edge, ...]:
    """Return the edges of a plain chain: each stage sends one tensor to the next."""
    return tuple(Edge(stage, stage + 1, "hidden") for stage in range(num_stages - 1))


@dataclass(frozen=True)
class Schedule:
    """One list per rank, and the rank of every stage: `placement[replica][stage]`.

    `done` are actions computed before the lists begin, whose results are kept: the lists then finish an interrupted
    step. Before each send in an `awaited` channel, a rank waits until the message before it in that channel has
    arrived, and frees it. So it holds one sent tensor of such a channel.
    """

    name: str
    num_stages: int
    num_micro_batches: int
    lists: tuple[Steps, ...]
    placement: tuple[tuple[int, ...], ...]
    edges: tuple[Edge, ...]
    options: Mapping[str, object] = field(default_factory=dict, hash=False)
    done: frozenset[Action] = frozenset()
    awaited: frozenset[Channel] = frozenset()

    @property
    def num_ranks(self) -> int:
        return len(self.lists)

    @property
    def has_messages(self) -> bool:
        return any(isinstance(step, Message) for steps in self.lists for step in steps)

    @cached_property
    def has_shadows(self) -> bool:
        return any(step.kind == SHADOW for steps in self.lists for step in steps)

    def rank_of(self, stage: int, replica: int = 0) -> int:
        return self.placement[replica][stage]

    def home(self, action: Action) -> int:
        """Return the rank that must run an action. A shadow forward runs on the rank of the stage before."""
        return self.rank_of(action.stage - (action.kind == SHADOW), action.replica)

    def compute(self, rank: int) -> tuple[Action, ...]:
        """Return a rank's list without its messages."""
        return tuple(step for step in self.lists[rank] if isinstance(step, Action))

    @cached_property
    def split_stages(self) -> frozenset[int]:
        """The stages whose weight gradients are separate actions."""
        steps = (step for steps in self.lists for step in steps)
        return frozenset(step.stage for step in steps if isinstance(step, Action) and step.kind == "weight")

    @cached_property
    def edges_into(self) -> tuple[list[int], ...]:
        """Indices of the edges into each stage."""
        return tuple([i for i, edge in enumerate(self.edges) if edge.target == s] for s in range(self.num_stages))

    @cached_property
    def edges_out_of(self) -> tuple[list[int], ...]:
        """Indices of the edges out of each stage."""
        return tuple([i for i, edge in enumerate(self.edges) if edge.source == s] for s in range(self.num_stages))

    @cached_property
    def channels(self) -> tuple[Channel, ...]:
        """The channels of a step with any number of micro-batches, sorted."""
        found: set[Channel] = set()
        for ranks in self.placement:
            for edge in self.edges:
                source, target = ranks[edge.source], ranks[edge.target]
                if source != target:
                    found.add(Channel(source, target, "forward"))
                    found |= {Channel(target, source, "backward")} if edge.backward else set()
        return tuple(sorted(found))

    def needs(self, action: Action) -> list[Need]:
        """Return the actions that must run before `action`."""
        stage, micro_batch, replica = action.stage, action.micro_batch, action.replica
        if action.kind == "weight":
            return [Need(Action("backward", stage, micro_batch, replica), None)]
        if action.kind in ("forward", SHADOW):
            return [
                Need(Action("forward", self.edges[i].source, micro_batch, replica), i) for i in self.edges_into[stage]
            ]
        own = Need(Action("forward", stage, micro_batch, replica), None)
        outward = [index for index in self.edges_out_of[stage] if self.edges[index].backward]
        return [own, *(Need(Action("backward", self.edges[i].target, micro_batch, replica), i) for i in outward)]

    def messages(self, action: Action) -> tuple[list[Message], list[Message]]:
        """Return the receives and the sends of `action` on its rank.

        Edges between stages of one rank need no message. A result that its receiver has already used is not sent.
        """
        if action.kind in ("weight", SHADOW):
            return [], []
        forward = action.kind == "forward"
        here = self.rank_of(action.stage, action.replica)

        def ends(what: str, indices: Iterable[int], upstream: bool) -> list[Message]:
            found = []
            for index in indices:
                if not (forward or self.edges[index].backward):
                    continue
                other = self.edges[index].source if upstream else self.edges[index].target
                peer = self.rank_of(other, action.replica)
                is_used = what == "send" and action._replace(stage=other) in self.done
                if peer != here and not is_used:
                    kind, ranks = f"{what}_{action.kind}", (here, peer) if what == "send" else (peer, here)
                    channel = Channel(*ranks, action.kind)
                    found.append(Message(kind, action.stage, action.micro_batch, action.replica, channel, index))
            return found

        inward, outward = self.edges_into[action.stage], self.edges_out_of[action.stage]
        received = ends("recv", inward if forward else outward, upstream=forward)
        return received, ends("send", outward if forward else inward, upstream=not forward)

    def resent_messages(self, rank: int) -> list[Message]:
        """Return the sends of results that the rank computed before the lists begin and that others still need."""
        made = sorted(
            (action for action in self.done if self.home(action) == rank), key=lambda a: (a.micro_batch, a.stage)
        )
        return [message for action in made for message in self.messages(action)[1]]


def with_messages(schedule: Schedule, edges: Iterable[Edge | tuple[int, int, str]] | None = None) -> Schedule:
    """Return the schedule with every send and receive in its lists. `edges` replace those of the schedule.

    A receive is posted before the computation that precedes the one that needs it, so that the message travels
    meanwhile; it is posted earlier if the order of its channel requires that. Posting early never blocks, so this adds
    no deadlock: the lists with messages complete if those without do. Messages already in the lists are derived again.
    """
    if edges is not None:
        schedule = replace(schedule, edges=check_edges(edges, schedule.num_stages))
    channels: dict[Channel, list[Message]] = defaultdict(list)  # the sends of each channel, in order
    wanted: dict[tuple[int, tuple[int, int, int, str]], tuple[int, Message]] = {}  # (rank, key) -> (position, receive)
    for rank in range(schedule.num_ranks):
        for message in schedule.resent_messages(rank):
            channels[message.channel].append(message)
        for place, action in enumerate(schedule.compute(rank)):
            received, sent = schedule.messages(action)
            for message in sent:
                channels[message.channel].append(message)
            for message in received:
                wanted[rank, message.key] = max(place - 1, 0), message
    posts: dict[tuple[int, int], list[Message]] = defaultdict(list)  # (rank, position) -> receives posted there
    for (_, receiver, _), sends in sorted(channels.items()):
        place, placed = len(schedule.lists[receiver]), []
        for send in reversed(sends):
            if (receiver, send.key) not in wanted:
                raise PlanError(f"{schedule.name}: no action of rank {receiver} takes what {send} sends")
            own_place, message = wanted[receiver, send.key]
            place = min(place, own_place)  # not after any later message of the channel
            placed.append((place, message))
        for at, message in reversed(placed):
            posts[receiver, at].append(message)
    lists = []
    for rank in range(schedule.num_ranks):
        steps: list[Action | Message] = list(schedule.resent_messages(rank))
        for place, action in enumerate(schedule.compute(rank)):
            steps += [*posts[rank, place], action, *schedule.messages(action)[1]]
        lists.append(tuple(steps))
    return replace(schedule, lists=tuple(lists))


def check_edges(edges: Iterable[Edge | tuple[int, int, str]], num_stages: int) -> tuple[Edge, ...]:
    """Return the edges as tuples. Raise PlanError unless each goes to a later stage and none is listed twice."""
    found = tuple(Edge(*edge) for edge in edges)
    for edge in found:
        if not 0 <= edge.source < edge.target < num_stages:
            raise PlanError(
                f"edge '{edge.name}' goes from stage {edge.source} to stage {edge.target}; "
                f"it must go from an earlier stage to a later one among 0..{num_stages - 1}"
            )
        if found.count(edge) > 1:
            raise PlanError(
                f"edge '{edge.name}' from stage {edge.source} to {edge.target} is listed twice; name it once"
            )
    return found
