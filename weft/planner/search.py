"""The search: every plan that fits, the fastest first.

What is inside a rank (x, y, sequence, context, micro-batch, recompute) is tried in the order of a bound: the step can
be no shorter than its compute spread over all devices without a wait or a word. For each, every way to lay the rest out
(pipe with its schedules, shard with its stages, data) is checked for memory and timed in closed form; one that does not
fit is tried with the least share of its state on the host with which it does. The search ends when no bound beats the
plans found. So nothing is left out that could have been among them. The best are then timed by their schedules' own
lists. Everything is arithmetic and in one order: the same question has the same answer.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any, Self

from weft.cluster.hardware import Cluster
from weft.parallel.apply import STRATEGIES
from weft.plan import Context, Pipe, Plan, Shard, Tensor
from weft.plan import Memory as MemoryPolicy
from weft.planner.closed_form_memory import Memory, Sizes, Working, memory, sizes, working
from weft.planner.question import Question
from weft.planner.step import StepModel, StepTime
from weft.profile import Profile
from weft.sharding.host_memory import KEPT_FREE_BYTES

MAX_MICRO_BATCH = 64
LONG_SEQUENCE = 16384  # from here on context is tried
NUM_TIMED = 48  # of the best in closed form, timed by their lists
NUM_TOO_LARGE = 5
REGATHER = "tensor.regather"
OFFLOAD, SHARES = "memory.offload", [share / 20 for share in range(21)]


@dataclass(frozen=True)
class Candidate:
    """A plan with its cost; `step` where its list was simulated."""

    plan: Plan
    num_micro_batches: int
    seconds: float
    memory: Memory
    step: StepTime | None = None


@dataclass(frozen=True)
class Found:
    """The best plans, those that would be as fast but do not fit (the nearest first), and how many were looked at."""

    best: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    refused: tuple[tuple[str, str], ...]  # what the model does not allow, with the reason
    num_considered: int


@dataclass(frozen=True)
class Model:
    """A model to be planned: its times, and a profile of one sequence of it (or of its first blocks) for its sizes.

    `ImageModel` is that of images.
    """

    steps: StepModel
    profile: Profile

    @property
    def num_blocks(self) -> int:
        return len(self.steps.workload.blocks)

    @property
    def numel(self) -> int:
        """Parameters of the whole model."""
        return self.profile.root.numel + self.profile.blocks[-1].numel * self.num_blocks

    @property
    def flops(self) -> float:
        """What forward and backward of one sequence need: causal attention counted half, recompute not at all."""
        work = self.steps.workload
        return sum(3 * (part.flops - part.attention_flops / 2) for part in (work.first, *work.blocks, work.last))

    @property
    def cluster(self) -> Cluster:
        return self.steps.cluster

    def on(self, cluster: Cluster) -> Self:
        """The model on another cluster."""
        return replace(self, steps=replace(self.steps, cluster=cluster))

    @cached_property
    def _sizes(self) -> dict[Any, Sizes]:
        return {}

    @cached_property
    def _working(self) -> dict[Any, tuple[Working, ...]]:
        return {}

    def held(self, plan: Plan, num_micro_batches: int) -> Memory:
        """What the fullest rank holds."""
        inside = (plan.tensor, plan.memory.recompute, plan.precision, plan.matmul)
        if inside not in self._sizes:
            self._sizes[inside] = sizes(self.profile, plan)
        key = (*inside, plan.context, plan.micro_batch, plan.memory.activations, plan.pipe, num_micro_batches)
        if key not in self._working:
            self._working[key] = working(self._sizes[inside], plan, self.num_blocks, num_micro_batches)
        return memory(self._working[key], self._sizes[inside], plan, num_micro_batches)

    def seeker(self, question: Question, keep: int) -> Search:
        """The search over plans for it."""
        return TextSearch(self, question, keep)


def search(model: Model, question: Question, keep: int = 10) -> Found:
    """The `keep` fastest plans that fit, in order."""
    return model.seeker(question, keep).run()


class Search(ABC):
    """What searches over plans of any kind of model share."""

    def __init__(self, model: Model, question: Question, keep: int) -> None:
        self.model, self.question, self.keep = model, question, keep
        self.steps = model.steps
        self.num_devices = model.steps.cluster.num_devices
        self.limit_bytes = model.steps.cluster.node.device.memory_bytes
        self.num_considered, self._room = 0, max(keep, NUM_TIMED)
        self._best: list[tuple[float, int, Candidate]] = []  # a heap, the slowest kept on top
        self._large: dict[tuple[int, ...], Candidate] = {}  # of each layout, the one that is nearest to fit
        self._refused: dict[str, str] = {}  # the first that has it, for each reason
        self._inner = [one for one in question.constraints if one.is_inner]
        self._outer = [one for one in question.constraints if not one.is_inner and one.name != OFFLOAD]
        self._regathers = not any(one.name == REGATHER for one in question.constraints)  # where a plan fits only so
        limits = [one for one in question.constraints if one.name == OFFLOAD]
        self._shares = [share for share in SHARES if all(one.compare(share) for one in limits)]

    def run(self) -> Found:
        inner = sorted(self._inner_plans(), key=lambda pair: pair[0])
        for bound, plan in inner:
            if self._is_slow(bound):
                break
            self._lay_out(plan)
        kept = sorted((item[2] for item in self._best), key=_rank)
        timed = sorted((self._time(candidate) for candidate in kept), key=_rank)[: self.keep]
        fastest = timed[0].seconds if timed else float("inf")
        large = [one for one in self._large.values() if one.seconds < fastest] or list(self._large.values())
        large = sorted(large, key=lambda candidate: candidate.memory.total_bytes)[:NUM_TOO_LARGE]
        refused = tuple((what, reason) for reason, what in self._refused.items())
        return Found(tuple(timed), tuple(large), refused, self.num_considered)

    @abstractmethod
    def _inner_plans(self) -> Iterable[tuple[float, Plan]]:
        """(bound, plan) for everything that shapes a rank's own work; the other axes are still 1."""

    @abstractmethod
    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        """The schedules to try on so many ranks."""

    def _allows(self, plan: Plan, num_micro_batches: int) -> bool:
        """Whether the model can be laid out so."""
        return True

    def _reason(self, plan: Plan) -> str | None:
        """Why the model does not allow it."""
        reasons = (strategy.refuse(self.model.profile, plan) for strategy in STRATEGIES)
        return next((reason for reason in reasons if reason is not None), None)

    # --- the rest

    def _lay_out(self, inner: Plan) -> None:
        group = inner.num_ranks
        room, batch = self.num_devices // group, self.question.batch
        assert inner.micro_batch is not None
        for degree in divisors(room):
            ranks = room // degree
            if degree > self.model.num_blocks:
                break
            if batch % (ranks * inner.micro_batch):
                continue
            num_micro_batches = batch // (ranks * inner.micro_batch)
            for pipe in self._pipes(degree, inner):
                if self._is_slow(self.steps.bound(inner, pipe, num_micro_batches)):
                    continue
                for shard in divisors(ranks):
                    for stage in (1, 2, 3) if shard > 1 else (1,):
                        plan = replace(inner, data=ranks // shard, pipe=pipe, shard=Shard(shard, stage))  # type: ignore[arg-type]
                        if all(one.holds(plan) for one in self._outer) and self._allows(plan, num_micro_batches):
                            self._consider(plan, num_micro_batches)

    def _is_slow(self, seconds: float) -> bool:
        """Whether all plans kept so far are faster."""
        return len(self._best) >= self._room and seconds >= -self._best[0][0]

    # --- costs

    def _time(self, candidate: Candidate) -> Candidate:
        step = self.steps.step(candidate.plan, candidate.num_micro_batches)
        return replace(candidate, seconds=step.seconds, step=step)

    def _offloaded(self, candidate: Candidate) -> Candidate | None:
        """A plan with the least share of its state on the host that is allowed and fits; None if there is none."""
        node, count = self.steps.cluster.node, candidate.num_micro_batches
        is_hopeless = candidate.memory.least_bytes > self.limit_bytes
        if node.host_link_bytes_per_second is None or not self._shares or is_hopeless:
            return None
        held = candidate.memory.total_bytes
        hosted = held - self._with_share(candidate, 1.0).memory.total_bytes
        least = max(0.0, (held - self.limit_bytes) / hosted) if hosted > 0 else 2.0
        share = next((share for share in self._shares if share >= least), None)
        room = node.host_memory_bytes / node.num_devices - KEPT_FREE_BYTES
        if share is None or hosted * share > room:
            return None
        found = self._with_share(candidate, share)
        if found.memory.total_bytes > self.limit_bytes:
            return None
        return replace(found, seconds=self.steps.estimate(found.plan, count))

    def _with_share(self, candidate: Candidate, share: float) -> Candidate:
        plan = replace(candidate.plan, memory=replace(candidate.plan.memory, offload=share))
        return replace(candidate, plan=plan, memory=self.model.held(plan, candidate.num_micro_batches))

    def _gather_again(self, plan: Plan, num_micro_batches: int) -> None:
        """Consider a plan that does not fit once more, with less of what enters matmuls kept, if it fits so."""
        if plan.memory.recompute == "none":  # others gather again as it is
            plan = replace(plan, tensor=replace(plan.tensor, regather=True))
            if self.model.held(plan, num_micro_batches).total_bytes <= self.limit_bytes:
                self._consider(plan, num_micro_batches)

    def _consider(self, plan: Plan, num_micro_batches: int) -> None:
        """Keep a plan if it is among the fastest that fit, or would be and is the nearest of its layout to fit."""
        self.num_considered += 1
        seconds = self.steps.estimate(plan, num_micro_batches)
        if self._is_slow(seconds):
            return  # one that does not fit and is slower than all that do teaches nothing
        held = self.model.held(plan, num_micro_batches)
        candidate: Candidate | None = Candidate(plan, num_micro_batches, seconds, held)
        assert candidate is not None
        is_large, layout = held.total_bytes > self.limit_bytes, tuple(plan.degrees.values())
        if is_large and (layout not in self._large or held.total_bytes < self._large[layout].memory.total_bytes):
            self._large[layout] = candidate
        if is_large and self._regathers and plan.tensor.sequence and not plan.tensor.regather:
            self._gather_again(plan, num_micro_batches)
        if is_large or self._shares[:1] != [0.0]:
            candidate = self._offloaded(candidate)
        if candidate is None or self._is_slow(candidate.seconds):
            return
        item = (-candidate.seconds, -self.num_considered, candidate)
        if len(self._best) < self._room:
            heapq.heappush(self._best, item)
        elif item > self._best[0]:
            heapq.heapreplace(self._best, item)


class TextSearch(Search):
    """Over x, y, sequence and context, with the schedules of equal blocks."""

    def _inner_plans(self) -> Iterator[tuple[float, Plan]]:
        """(bound, plan) for everything that shapes a rank's own work; the other axes are still 1."""
        for x in divisors(self.num_devices):
            for y in divisors(self.num_devices // x):
                for sequence, regather in self._sequences(x):
                    tensor = Tensor(x, y, sequence, regather)
                    reason = self._reason(Plan(tensor=tensor))
                    if reason is not None:
                        self._refused.setdefault(reason, f"x {x} × y {y}")
                        continue
                    for context in self._contexts(self.num_devices // (x * y)):
                        yield from self._policies(tensor, context)

    def _sequences(self, x: int) -> list[tuple[bool, bool]]:
        """Both ways to split the stream over x; to gather again only where the question names that."""
        if x == 1:
            return [(False, False)]
        return [(False, False), (True, False), *([] if self._regathers else [(True, True)])]

    def _policies(self, tensor: Tensor, context: int) -> Iterator[tuple[float, Plan]]:
        batch = self.question.batch
        for micro_batch in divisors(batch):
            if micro_batch > MAX_MICRO_BATCH:
                break
            for recompute in ("none",) if tensor.regather else ("none", "selective", "full"):
                plan = Plan(
                    tensor=tensor,
                    context=Context(context),
                    micro_batch=micro_batch,
                    memory=MemoryPolicy(recompute),  # type: ignore[arg-type]
                    precision=self.question.precision,  # type: ignore[arg-type]
                )
                if not all(one.holds(plan) for one in self._inner):
                    continue
                one = self.steps.chain(plan)
                group = tensor.x * tensor.y * context
                yield batch / micro_batch * sum(one) * group / self.num_devices, plan

    def _contexts(self, room: int) -> list[int]:
        if self.question.sequence < LONG_SEQUENCE:
            return [1]
        return [c for c in divisors(room) if self.question.sequence % (2 * c) == 0 and not self._refuses_context(c)]

    def _refuses_context(self, degree: int) -> bool:
        return degree > 1 and self._reason(Plan(context=Context(degree))) is not None

    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        if degree == 1:
            return [Pipe()]
        found = [Pipe(degree)]
        found += [Pipe(degree, "interleaved", chunks=c) for c in (2, 4) if degree * c <= self.model.num_blocks]
        if inner.tensor.x * inner.tensor.y == 1:
            found.append(Pipe(degree, "zero-bubble"))
        return found


@lru_cache(maxsize=1 << 12)
def divisors(number: int) -> tuple[int, ...]:
    """Of a number, in order."""
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.seconds, candidate.memory.total_bytes, candidate.plan.describe_axes()
