"""The search: every plan that fits, the fastest first.

What is inside a rank (x, y, sequence, context, micro-batch, recompute) is tried in the order of a bound: the step can
be no shorter than its compute spread over all devices without a wait or a word. For each, every way to lay the rest out
(pipe with its schedules, shard with its stages, data) is checked for memory and timed in closed form; the search ends
when no bound beats the plans found. So nothing is left out that could have been among them. The best are then timed by
their schedules' own lists. Everything is arithmetic and in one order: the same question has the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from weft.parallel import STRATEGIES
from weft.parallel.tensor import localise
from weft.plan import Context, Pipe, Plan, Shard, Tensor
from weft.plan import Memory as MemoryPolicy
from weft.planner.memory import Memory, Sizes, memory
from weft.planner.step import StepModel, StepTime
from weft.profile import Profile

MAX_MICRO_BATCH = 64
LONG_SEQUENCE = 16384  # from here on context is tried
NUM_TIMED = 48  # of the best in closed form, timed by their lists


@dataclass(frozen=True)
class Question:
    """What is to be planned: a batch of sequences a step, on all devices of the model's cluster."""

    batch: int
    sequence: int
    precision: str = "bf16"
    allows: Callable[[Plan], bool] = lambda plan: True


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
    """The best plans, the fastest of those that do not fit, and how many were looked at."""

    best: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    num_considered: int


@dataclass(frozen=True)
class Model:
    """A model to be planned: its times, and a profile of one sequence of it (or of its first blocks) for its sizes."""

    steps: StepModel
    profile: Profile

    @property
    def num_blocks(self) -> int:
        return len(self.steps.workload.blocks)


def search(model: Model, question: Question, keep: int = 10) -> Found:
    """The `keep` fastest plans that fit, in order."""
    seeker = _Search(model, question, keep)
    return seeker.run()


class _Search:
    def __init__(self, model: Model, question: Question, keep: int) -> None:
        self.model, self.question, self.keep = model, question, keep
        self.steps = model.steps
        self.num_devices = model.steps.cluster.num_devices
        self.limit_bytes = model.steps.cluster.node.device.memory_bytes
        self.num_considered, self._room = 0, max(keep, NUM_TIMED)
        self._best: list[tuple[float, int, Candidate]] = []  # a heap, the slowest kept on top
        self._large: list[tuple[float, int, Candidate]] = []
        self._sizes: dict[tuple[int, int, bool, str], Sizes] = {}

    def run(self) -> Found:
        inner = sorted(self._inner_plans(), key=lambda pair: pair[0])
        for bound, plan in inner:
            if len(self._best) >= self._room and bound >= -self._best[0][0]:
                break
            self._lay_out(plan)
        kept = sorted((item[2] for item in self._best), key=_rank)
        timed = sorted((self._time(candidate) for candidate in kept), key=_rank)[: self.keep]
        large = sorted((item[2] for item in self._large), key=_rank)
        return Found(tuple(timed), tuple(large), self.num_considered)

    # --- what is inside a rank

    def _inner_plans(self) -> Iterator[tuple[float, Plan]]:
        """(bound, plan) for everything that shapes a rank's own work; the other axes are still 1."""
        for x in _divisors(self.num_devices):
            for y in _divisors(self.num_devices // x):
                for sequence in (False, True) if x > 1 else (False,):
                    tensor = Tensor(x, y, sequence)
                    if self._refuses(Plan(tensor=tensor)):
                        continue
                    for context in self._contexts(self.num_devices // (x * y)):
                        yield from self._policies(tensor, context)

    def _policies(self, tensor: Tensor, context: int) -> Iterator[tuple[float, Plan]]:
        batch = self.question.batch
        for micro_batch in _divisors(batch):
            if micro_batch > MAX_MICRO_BATCH:
                break
            for recompute in ("none", "selective", "full"):
                plan = Plan(
                    tensor=tensor,
                    context=Context(context),
                    micro_batch=micro_batch,
                    memory=MemoryPolicy(recompute),  # type: ignore[arg-type]
                    precision=self.question.precision,  # type: ignore[arg-type]
                )
                one = self.steps.chain(plan)
                group = tensor.x * tensor.y * context
                yield batch / micro_batch * sum(one) * group / self.num_devices, plan

    def _contexts(self, room: int) -> list[int]:
        if self.question.sequence < LONG_SEQUENCE:
            return [1]
        return [c for c in _divisors(room) if self.question.sequence % (2 * c) == 0 and not self._refuses_context(c)]

    def _refuses_context(self, degree: int) -> bool:
        return degree > 1 and self._refuses(Plan(context=Context(degree)))

    def _refuses(self, plan: Plan) -> bool:
        return any(strategy.refuse(self.model.profile, plan) for strategy in STRATEGIES)

    # --- the rest

    def _lay_out(self, inner: Plan) -> None:
        group = inner.tensor.x * inner.tensor.y * inner.context.degree
        room, batch = self.num_devices // group, self.question.batch
        assert inner.micro_batch is not None
        for degree in _divisors(room):
            if degree > self.model.num_blocks:
                break
            for shard in _divisors(room // degree):
                ranks = room // degree
                if batch % (ranks * inner.micro_batch):
                    break
                num_micro_batches = batch // (ranks * inner.micro_batch)
                for pipe in self._pipes(degree, inner):
                    for stage in (1, 2, 3) if shard > 1 else (1,):
                        plan = replace(inner, data=ranks // shard, pipe=pipe, shard=Shard(shard, stage))  # type: ignore[arg-type]
                        if self.question.allows(plan):
                            self._consider(plan, num_micro_batches)

    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        if degree == 1:
            return [Pipe()]
        found = [Pipe(degree)]
        found += [Pipe(degree, "interleaved", chunks=c) for c in (2, 4) if degree * c <= self.model.num_blocks]
        if inner.tensor.x * inner.tensor.y == 1:
            found.append(Pipe(degree, "zero-bubble"))
        return found

    # --- costs

    def _time(self, candidate: Candidate) -> Candidate:
        step = self.steps.step(candidate.plan, candidate.num_micro_batches)
        return replace(candidate, seconds=step.seconds, step=step)

    def _sizes_of(self, plan: Plan) -> Sizes:
        key = (plan.tensor.x, plan.tensor.y, plan.tensor.sequence, plan.memory.recompute)
        if key not in self._sizes:
            self._sizes[key] = sizes(self.model.profile, plan)
        return self._sizes[key]

    def _consider(self, plan: Plan, num_micro_batches: int) -> None:
        """Keep a plan if it is among the fastest that fit, or the fastest that do not."""
        self.num_considered += 1
        seconds = self.steps.estimate(plan, num_micro_batches)
        if len(self._best) >= self._room and seconds >= -self._best[0][0]:
            return  # one that does not fit and is slower than all that do teaches nothing
        held = memory(self._sizes_of(plan), plan, self.model.num_blocks, num_micro_batches)
        heap, size = (self._best, self._room) if held.total_bytes <= self.limit_bytes else (self._large, 5)
        item = (-seconds, -self.num_considered, Candidate(plan, num_micro_batches, seconds, held))
        if len(heap) < size:
            heapq.heappush(heap, item)
        elif item > heap[0]:
            heapq.heapreplace(heap, item)


def sizes(profile: Profile, plan: Plan) -> Sizes:
    """A rank's part of one block and of the ends, from a profile of one sequence."""
    at = dict.fromkeys(plan.degrees, 0)
    local = localise(profile, replace(plan, context=Context()), at)
    block = local.blocks[-1]
    names = {parameter.name: float(parameter.numel) for parameter in local.root.parameters}
    embeddings = profile.pairing.embeddings
    first = sum(numel for name, numel in names.items() if name.rpartition(".")[0] in embeddings)
    last = sum(names.values()) - first
    split_heads = [split.module for split in profile.pairing.splits.values() if split.kind == "head"]
    if any(f"{head}.weight" not in names for head in split_heads):  # tied: both ends hold it
        last += max(names.values(), default=0.0)
    heads = [
        layer for name, layer in profile.layers.items() if layer.is_linear and profile.pairing.block_of(name) is None
    ]
    logits = max((layer.rows * layer.out_features for layer in heads), default=0) / plan.tensor.x
    saved = {kind: float(size) for kind, size in (block.saved_bytes or {}).items()}
    kind = plan.memory.recompute
    root_saved = float((local.root.saved_bytes or {}).get(kind, 0))
    return Sizes(sum(names.values()), first, float(block.numel), last, saved, root_saved, logits)


@lru_cache(maxsize=1 << 12)
def _divisors(number: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return tuple(sorted({*small, *(number // d for d in small)}))


def _rank(candidate: Candidate) -> tuple[float, float, str]:
    return candidate.seconds, candidate.memory.total_bytes, candidate.plan.describe_axes()
