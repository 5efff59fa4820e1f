"""The ranks that compute one model together: what the scheduling rank tells the others, and messages between stages.

The rank at index 0 of a replica schedules and samples. For each step it broadcasts the inputs, from host memory; all
ranks then compute their parts. Messages are whole numbers or JSON; nothing is unpickled.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from weft.cluster.small_choice import STRATEGIES, SYMMETRIC, SmallChoice, Strategy
from weft.comm import Axis, Pending, all_reduce, broadcast, receive, send
from weft.comm.small_measure import measured_choice
from weft.comm.small_sums import with_symmetric_memory
from weft.mesh import Mesh
from weft.serve.model.linear import ModelAxes
from weft.serve.model.step_inputs import StepInputs
from weft.serve.parallel.rank_part import RankPlace, stage_of

Kind = Literal["step", "text", "score", "order", "idle", "pass", "stop"]
_KINDS: tuple[Kind, ...] = get_args(Kind)
_HEADER_SIZE = 7
AXES = ("x", "y", "expert")  # over which partial results are added up
Sums = Strategy | Literal["measured"]


@dataclass(frozen=True)
class RankMessage:
    """A message from the scheduling rank. `kind`: step (compute a step), text (hidden states of a text), score (its
    log-probabilities), order (a JSON order, such as newer weights), idle (no work: all ranks meet), pass (take part in
    reading weights with other replicas), stop (end).
    """

    kind: Kind
    inputs: StepInputs | None = None
    order: dict[str, Any] | None = None


class ServingRanks:
    """One rank's view of the ranks that compute a model together. Creating it makes groups: all ranks must do it.

    `sums` says how partial results are added up: by a strategy of `cluster/small_choice.py`, or by the one that is
    measured to be the fastest for each size. With `streams`, weights are in host memory: `readers` are the ranks of all
    replicas that read the same ones, together.
    """

    def __init__(
        self,
        mesh: Mesh,
        sums: Sums = "library",
        streams: bool = False,
        say: Callable[[str], None] = lambda message: None,
    ) -> None:
        """`say` is told if sums cannot be carried out as they should be."""
        plan = mesh.plan
        self.mesh, self.num_stages = mesh, plan.pipe.degree
        self.place = RankPlace(plan, mesh.coordinates)
        self.stage = stage_of(self.place)
        # The ranks of a replica have consecutive numbers.
        self.inputs = replace(mesh.neighbours("world", plan.num_ranks // plan.data), name="replica")
        self.is_lead = self.inputs.index == 0
        everyone = mesh["world"]
        self._everyone = mesh.with_own_group("world", "agreement") if everyone.degree > 1 else everyone
        axes = [_with_sums(mesh[name], sums, mesh.device, say) for name in AXES if mesh[name].degree > 1]
        self.axes = ModelAxes(
            **{axis.name: axis if sums == "library" else self._with_agreed_sums(axis) for axis in axes},
            context=mesh["context"] if plan.context.degree > 1 else None,
        )
        self.readers = mesh.with_own_group("data", "weights") if streams and plan.data > 1 else None
        self._before, self._after = self._channels()
        self._sends: deque[tuple[Pending, Tensor]] = deque()
        self.failure: Exception | None = None  # of this rank in a step that others compute
        self.is_watched = False  # Does this rank write its status page? A rank that never does is not watched for hangs
        self._num_messages = 0

    @property
    def is_first_stage(self) -> bool:
        return self.stage == 0

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.num_stages - 1

    def tell(self, message: RankMessage) -> None:
        """On the scheduling rank: tell all others. Returns when they have been told, but for steps of a pipeline.

        Raises RuntimeError after a failure: what the others compute next would meet what they wait for.
        """
        self._begin_step()
        if self.inputs.degree == 1:
            return
        if self.failure is not None:
            raise RuntimeError(f"ranks are out of step, as one of them failed: {self.failure!r}") from self.failure
        header, payload = _packed(message)
        sends = [broadcast(one, self.inputs) for one in (header, payload)]
        if self.num_stages == 1 or message.kind != "step":
            for one in sends:
                one.wait()
            while self._sends:
                self._sends.popleft()[0].wait()
        else:
            self._keep(zip(sends, (header, payload), strict=True), 4 * self.num_stages)

    def next_message(self) -> RankMessage:
        """On other ranks: wait for what the scheduling rank tells."""
        header = torch.empty(_HEADER_SIZE, dtype=torch.int64)
        broadcast(header, self.inputs).wait()
        payload = torch.empty(int(header[1]), dtype=torch.int32)
        broadcast(payload, self.inputs).wait()
        self._begin_step()
        return _unpacked(header, payload)

    def meet(self) -> None:
        """Return when all ranks of this replica have called it."""
        if self.inputs.degree > 1:
            all_reduce(torch.zeros(1), self.inputs).wait()

    def _begin_step(self) -> None:
        """Record on the status page that the work of one more message begins."""
        status = self.mesh.ledger.status
        if self.is_watched and status is not None:
            status.step_begins(self._num_messages)
            status.phase("serving")
        self._num_messages += 1

    def agree(self, number: int) -> int:
        """Return the smallest of the numbers that the ranks of all replicas give. All must call it."""
        smallest = torch.tensor([number])
        all_reduce(smallest, self._everyone, "min").wait()
        return int(smallest)

    def who_fails(self, fails: bool) -> tuple[bool, bool]:
        """Return whether any rank of all replicas fails, and whether this one is the first that does. All must
        call it.
        """
        first = self.agree(self._everyone.index if fails else self._everyone.degree)
        return first < self._everyone.degree, first == self._everyone.index

    def _with_agreed_sums(self, axis: Axis) -> Axis:
        """Return the axis with strategies that all ranks take. Each group of ranks measures for itself, and has
        symmetric memory or not; ranks of other axes that compute the same must round the same.
        """
        assert axis.small is not None
        has_symmetric = axis.symmetric is not None
        own = [one if has_symmetric or one not in SYMMETRIC else "library" for one in axis.small.strategies]
        numbers = torch.tensor([STRATEGIES.index(one) for one in own])
        all_reduce(numbers, self._everyone, "min").wait()
        return replace(axis, small=replace(axis.small, strategies=tuple(STRATEGIES[one] for one in numbers.tolist())))

    def agree_on_rows(self, numbers: list[int]) -> list[int]:
        """Return, for each number of a list, the smallest that ranks with the same blocks give, on CPUs. Each rank
        measures for itself up to how many rows it multiplies codes; ranks that compute the same must round the same.
        All ranks must call it, with lists of one length.
        """
        smallest = torch.tensor(numbers, dtype=torch.int64)
        for name in ("data", *AXES, "context") if numbers else ():
            if self.mesh[name].degree > 1:
                all_reduce(smallest, self.mesh[name], "min").wait()
        return smallest.tolist()

    def add_up(self, number: int) -> int:
        """Return the sum, modulo 2^64, of the numbers of 64 bits that the ranks of this replica give, once for those of
        `context`, which hold the same weights. All must call it.
        """
        if self.axes.context is not None and self.axes.context.index > 0:
            number = 0
        parts = torch.tensor([number >> 16 * index & 0xFFFF for index in range(4)])
        if self.inputs.degree > 1:
            all_reduce(parts, self.inputs).wait()
        total: int = sum(one << 16 * index for index, one in enumerate(parts.tolist()))
        return total % (1 << 64)

    def agree_on_text(self, text: str) -> str:
        """Return the text that rank 0 gives. All ranks must call it."""
        size = torch.tensor([len(text.encode())])
        broadcast(size, self._everyone).wait()
        found = torch.zeros(int(size), dtype=torch.uint8)
        if self._everyone.index == 0:
            found = torch.tensor(list(text.encode()), dtype=torch.uint8)
        broadcast(found, self._everyone).wait()
        return bytes(found.tolist()).decode()

    def receive_residual(self, num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return the residual stream from the stage before."""
        assert self._before is not None
        residual = torch.empty(num_tokens, width, dtype=dtype, device=device)
        receive(residual, self._before, 1 - self._before.index, "residual stream").wait()
        return residual

    def send_residual(self, residual: Tensor) -> None:
        """Send the residual stream to the stage behind. Does not wait until it has arrived."""
        assert self._after is not None
        residual = residual.contiguous()
        self._keep([(send(residual, self._after, 1 - self._after.index, "residual stream"), residual)], self.num_stages)

    def _keep(self, sends: Any, most: int) -> None:
        """Keep what is being sent alive, and wait for the oldest beyond `most`."""
        self._sends.extend(sends)
        while len(self._sends) > most:
            self._sends.popleft()[0].wait()

    def _channels(self) -> tuple[Axis | None, Axis | None]:
        """Return the axes of two ranks from the stage before, and to the stage behind."""
        before = after = None
        for stage in range(self.num_stages - 1):
            indices = [(stage + 1) % self.num_stages, (stage + 2) % self.num_stages]
            channel = self.mesh.pair("pipe", indices[0], indices[1], "residual stream")
            if stage == self.stage:
                after = channel
            if stage + 1 == self.stage:
                before = channel
        return before, after


def _with_sums(axis: Axis, sums: Sums, device: torch.device, say: Callable[[str], None]) -> Axis:
    if sums == "library":
        return axis
    if sums == "measured" or sums in SYMMETRIC:
        axis, reason = with_symmetric_memory(axis, device)
        if reason is not None and sums != "measured":
            name = sums.replace("_", "-")
            say(f"--sums {name} needs symmetric memory: {reason}; the library adds up over {axis.name}")
    return replace(axis, small=measured_choice(axis, device) if sums == "measured" else SmallChoice.always(sums))


def _packed(message: RankMessage) -> tuple[Tensor, Tensor]:
    """Return a header of fixed size, and a payload of int32."""
    payload, sizes = torch.zeros(1, dtype=torch.int32), [0] * (_HEADER_SIZE - 2)
    if message.inputs is not None:
        given = message.inputs
        lists = torch.tensor([*given.queries, *given.sampled], dtype=torch.int32)
        payload = torch.cat([given.flat.reshape(-1), given.tables.reshape(-1), lists])
        sizes = [given.num_tokens, *given.tables.shape, given.num_decodes, len(given.sampled)]
    elif message.order is not None:
        payload = torch.tensor(list(json.dumps(message.order).encode()), dtype=torch.int32)
    header = torch.tensor([_KINDS.index(message.kind), payload.numel(), *sizes])
    return header, payload


def _unpacked(header: Tensor, payload: Tensor) -> RankMessage:
    number, _, num_tokens, num_requests, width, num_decodes, num_sampled = header.tolist()
    kind = _KINDS[number]
    if kind in ("step", "text", "score"):
        flat, tables, queries, sampled = payload.split(
            [4 * num_tokens, num_requests * width, num_requests, num_sampled]
        )
        lists = (queries.tolist(), num_decodes, sampled.tolist())
        inputs = StepInputs(flat.view(4, -1), tables.view(-1, width), *lists)
        return RankMessage(kind, inputs)
    order = json.loads(bytes(payload.tolist())) if kind == "order" else None
    return RankMessage(kind, order=order)
