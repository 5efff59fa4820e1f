"""The search for the fastest plans that fit into memory.

It always tries next what has the lowest bound of its time, and ends when no remaining bound is lower than the times of
the plans found. Each bound is at most the time of every plan behind it, so the search misses no plan that is among the
fastest, and times few others. Each bound leads to higher ones:

1. Settings that shape a rank's own work (those that the strategies of the axes name, micro-batch, recompute): a step
   takes at least its kernels, and then its kernels and collectives, divided over all devices.
2. Each of them with a pipeline and its schedule: waits, and the update of the state, are added.
3. All divisions of a pipeline's ranks over shard, with its stages, and data are checked for memory.
4. The schedule of a plan that fits is run, as if its ranks never waited for parameters and gradients, and then with all
   collectives.
5. A plan that does not fit: it is tried with stages by memory, with recompute in its first stages, with fewer
   micro-batches in flight, and with inputs of matmuls gathered again (`smaller_forms.py`), all of them slower.

A plan that does not fit is also tried with the smallest share of its state in host memory with which it does. Other
forms of the best plans are tried at last. The search is deterministic: the same question has the same answer.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from bisect import insort
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Literal, Self

from weft.cluster.hardware import Cluster
from weft.errors import PlanError
from weft.memory.offload_activations import offloaded_blocks
from weft.parallel.apply import STRATEGIES
from weft.plan import Memory as MemoryPolicy
from weft.plan import Pipe, Plan, Recompute, Shard
from weft.planner.asked import AskedFields
from weft.planner.candidate import Candidate, SearchResult, nearest_to_fit, offloaded, rank
from weft.planner.closed_form_memory import RankMemory, Sizes, plan_sizes
from weft.planner.common_costs import CommonCosts, TextCosts, costs_of_stages
from weft.planner.host_link import copied_seconds, equal_trips
from weft.planner.memory_stages import StageChoice
from weft.planner.other_forms import with_other_forms
from weft.planner.question import Question, size_settings, with_fields
from weft.planner.schedule_time import least_with_any_stages, schedule_refusal
from weft.planner.smaller_forms import IN_FLIGHT, SmallerForms
from weft.planner.step import ROUNDING, StepModel, StepTime
from weft.profiling import Profile, ProfileCache
from weft.schedule.schedules import SCHEDULES
from weft.sharding.layout import evenly_spaced
from weft.strategy import SearchSpace, Strategy, divisors

SAME = 2e-9  # relative difference of times that may be rounding
NUM_SURE = 10  # of the plans that are kept, the first so many are sure to be the fastest that there are
RECOMPUTES: tuple[Recompute, ...] = ("none", "selective", "full")
# Both are the same on every cluster.
_SIZES = ProfileCache[tuple[Any, ...], Sizes]()
_REASONS = ProfileCache[Plan, dict[Any, str | None]]()  # by fields of a plan, why a model does not allow them


@dataclass(frozen=True)
class Model:
    """A model to plan: its times, and a profile of one sequence (of it, or of its first blocks) for its sizes.

    `ImageModel` is the subclass for images.
    """

    steps: StepModel
    profile: Profile

    @property
    def num_blocks(self) -> int:
        return len(self.steps.workload.blocks)

    @property
    def numel(self) -> int:
        """The number of parameters of the whole model."""
        return self.profile.root.numel + self.profile.blocks[-1].numel * self.num_blocks

    @property
    def num_experts(self) -> int:
        """The largest number that divides the experts of every layer; 1 if the model has none."""
        return math.gcd(*(one.num_experts for block in self.profile.blocks for one in block.experts)) or 1

    @property
    def flops(self) -> float:
        """FLOPs of forward and backward for one sequence, with half of attention (causal) and without recompute."""
        work = self.steps.workload
        return sum(3 * (part.flops - part.attention_flops / 2) for part in (work.first, *work.blocks, work.last))

    @property
    def cluster(self) -> Cluster:
        return self.steps.cluster

    def on(self, cluster: Cluster) -> Self:
        """Returns the same model with the step times of another cluster."""
        return replace(self, steps=self.steps.on(cluster))

    def _sizes_of(self, plan: Plan) -> Sizes:
        """The sizes of a rank's part of the model."""
        parts, memory = plan.num_expert_parts, plan.memory
        inside = (size_settings(plan), parts, memory.recompute, memory.recompute_stages is not None, plan.matmul)
        return _SIZES.get(self.profile, inside, lambda: plan_sizes(self.profile, plan))

    def held(self, plan: Plan, num_micro_batches: int) -> RankMemory:
        """Memory of the rank that needs most."""
        return self.common(plan, num_micro_batches).memory(plan)

    def common(self, plan: Plan, num_micro_batches: int) -> CommonCosts:
        """The costs that the plan shares with plans that differ only in data, shard and offloaded state."""
        return TextCosts(plan, num_micro_batches, self.steps, self._sizes_of)

    def step(self, plan: Plan, num_micro_batches: int) -> StepTime:
        """Times a step, with copies of activations and weights to the host and back that compute does not hide."""
        found, memory = self.steps.step(plan, num_micro_batches), plan.memory
        if not memory.activations and not memory.weights:
            return found
        num_streamed = len(evenly_spaced(self.num_blocks, memory.weights))
        trips = equal_trips(num_streamed, self.profile.blocks[-1].numel, plan, num_micro_batches)
        sent = int(num_micro_batches * self._sent_bytes(plan))
        copied, exposed = copied_seconds(sent, trips, plan, found.where["compute"], self.cluster)
        return (
            replace(found, seconds=found.seconds + exposed, where={**found.where, "host": exposed}) if copied else found
        )

    def _sent_bytes(self, plan: Plan) -> float:
        """Bytes of saved activations that a micro-batch sends to the host."""
        sent = len(offloaded_blocks(self.num_blocks, plan.memory.activations)) * self._sizes_of(plan).block_sent
        return sent * (plan.micro_batch or 1) / plan.num_parts("tokens")

    def stage_choice(self, plan: Plan, num_micro_batches: int, limit_bytes: float) -> StageChoice | None:
        """Returns what chooses the plan's stages by memory; None if the model's blocks are not equal."""
        costs = costs_of_stages(plan, num_micro_batches, self.steps, self._sizes_of)
        return None if costs is None else StageChoice.of(costs, plan, limit_bytes)

    def seeker(self, question: Question, keep: int) -> Search:
        """Returns the search over plans for this model."""
        return TextSearch(self, question, keep)


def search(model: Model, question: Question, keep: int = 10, limit_seconds: float = math.inf) -> SearchResult:
    """Returns the `keep` fastest plans that fit, in order. A step of theirs takes less than `limit_seconds`."""
    seeker = model.seeker(question, keep)
    seeker.limit_seconds = limit_seconds
    return seeker.run()


class Search(ABC):
    """The common part of the searches over plans of language and image models."""

    def __init__(self, model: Model, question: Question, keep: int) -> None:
        self.model, self.question, self.keep = model, question, keep
        self.steps = model.steps
        self.num_devices = model.steps.cluster.num_devices
        self.limit_seconds, self.limit_bytes = math.inf, model.steps.cluster.node.device.memory_bytes
        self.num_considered, self._room = 0, max(keep, NUM_SURE)
        self._num_sure = min(keep, NUM_SURE)
        self._best: list[Candidate] = []  # in order of their times
        self._large: list[Candidate] = []  # plans that do not fit and would be among the fastest
        # What may still be tried: (lower bound of its seconds, order, function that tries it, arguments).
        self._untried: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order, self._least = count(), math.inf  # the lowest bound of settings that shape a rank's own work
        self._reasons = _REASONS.get(model.profile, self._base, dict)
        self._refused: dict[str, str] = {}  # by reason, the first plan that was refused for it
        self._asked = AskedFields(question.constraints)
        self._names, self._shares = self._asked.names, self._asked.shares
        self._smaller = SmallerForms(model, self._asked, self.limit_bytes, self._is_slow)

    def run(self) -> SearchResult:
        """Runs the search."""
        for plan in self._inner_plans():
            self._try_later(self._inner_bound(plan, self.steps.kernel_seconds(plan)), self._bound, plan)
        while self._untried and not self._is_slow(self._untried[0][0]):
            _, _, try_it, arguments = heapq.heappop(self._untried)
            try_it(*arguments)
        forms = with_other_forms(self._best, self.model, self.limit_bytes, self._reason, self._asked.holds_outer)
        timed = sorted(map(self._time, forms), key=rank)
        timed = [one for one in timed if one.seconds < self.limit_seconds][: self.keep]
        large = nearest_to_fit(self._large, timed[0].seconds if timed else math.inf, self._seconds)
        refused = tuple((what, reason) for reason, what in self._refused.items())
        least = 0.0 if math.isinf(self._least) else self._least * self.num_devices
        return SearchResult(tuple(timed), tuple(large), refused, self.num_considered, least, self._unmet())

    def _unmet(self) -> dict[str, str]:
        """By the text of each constraint that no plan satisfied, the reason."""
        unmet = [one for one in self.question.constraints if not self._asked.is_met(one)]
        return {one.text: self._asked.reason(one, self._asked.alone(one, self._base, self._reason)) for one in unmet}

    @property
    def _base(self) -> Plan:
        """The plan that the search varies."""
        return Plan(precision=self.question.precision)

    def _try_later(self, bound: float, try_it: Callable[..., None], *arguments: Any) -> None:
        """Calls `try_it(*arguments)`, which tries plans that take at least `bound` seconds, when no bound is lower."""
        heapq.heappush(self._untried, (bound, next(self._order), try_it, arguments))

    def _inner_plans(self) -> Iterator[Plan]:
        """Yields plans with all settings that shape a rank's own work. The other axes have degree 1."""
        base = self._asked.shaped(self._base)
        return (one for plan in self._settings(base, STRATEGIES) for one in self._policies(plan))

    def _bound(self, inner: Plan) -> None:
        """Lays an inner plan out later, in the order of a bound that counts its collectives, too."""
        bound = self._inner_bound(inner, sum(self.steps.chain(inner)))
        self._least = min(self._least, bound)
        self._try_later(bound, self._lay_out, inner)

    def _inner_bound(self, plan: Plan, seconds: float) -> float:
        """A lower bound of a step in which a micro-batch takes `seconds` in the whole model, on any number of ranks."""
        assert plan.micro_batch is not None
        rounds = self.question.batch / plan.micro_batch / plan.num_batch_ranks
        return rounds * seconds * plan.num_ranks / self.num_devices

    def _settings(self, plan: Plan, strategies: Sequence[Strategy]) -> Iterator[Plan]:
        """Yields the plan under all settings of these strategies' axes."""
        if not strategies:
            yield plan
            return
        question, asked = self.question, frozenset(one.name for one in self.question.constraints)
        samples: Literal["sequences", "images"] = "sequences" if question.shape is None else "images"
        room = self.num_devices // plan.num_ranks
        space = SearchSpace(room, samples, question.sequence, asked, self.model.num_experts, plan)
        for fields in strategies[0].settings(space):
            for allowed in self._allowed(strategies[0], fields):
                yield from self._settings(replace(plan, **allowed) if allowed else plan, strategies[1:])

    def _allowed(self, strategy: Strategy, fields: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
        """Yields the fields if the model allows a plan with them alone. Otherwise, remembers the reason."""
        key = tuple(fields.items())
        if fields and key not in self._reasons:
            self._reasons[key] = self._reason(Plan(**fields))
        reason = self._reasons.get(key)
        if reason is None:
            yield fields
            return
        degrees = Plan(**fields).degrees
        self._refused.setdefault(reason, " × ".join(f"{axis} {degrees[axis]}" for axis in strategy.axes))

    def _policies(self, inner: Plan) -> Iterator[Plan]:
        """Yields the plan with each micro-batch and recompute policy; with kept collectives where experts are split."""
        batch = self.question.batch
        for micro_batch in divisors(batch):
            if inner.tile.hand_over == "batch" and micro_batch % inner.tile.degree:
                continue
            for recompute in RECOMPUTES[:1] if inner.tensor.regather else self._recomputes:
                for keeps in (False, True)[: 1 + (recompute != "none" and inner.num_expert_parts > 1)]:
                    memory = MemoryPolicy(recompute, keep_collectives=keeps)
                    plan = inner.changed(micro_batch=micro_batch, memory=memory)
                    if self._asked.holds_inner(plan):
                        yield self._asked.shaped(plan) if self._asked.fields else plan

    @cached_property
    def _recomputes(self) -> tuple[Recompute, ...]:
        """The recompute policies that the model allows."""
        return tuple(one for one in RECOMPUTES if self._reason(Plan(memory=MemoryPolicy(one))) is None)

    @abstractmethod
    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        """The schedules to try with `degree` pipeline ranks."""

    def _allows(self, plan: Plan, num_micro_batches: int) -> bool:
        """Can the model be laid out this way?"""
        return True

    def _reason(self, plan: Plan) -> str | None:
        """The reason why the model does not allow the plan; None if it does."""
        reasons = (strategy.refuse(self.model.profile, plan) for strategy in STRATEGIES)
        return next((reason for reason in reasons if reason is not None), None)

    def _refuses(self, plan: Plan, reason: str | None = None) -> bool:
        """Does the model refuse the whole plan, or is there another `reason`? Remembers why.

        Settings that are each allowed may not go together.
        """
        reason = reason or self._reason(plan)
        if reason is not None:
            self._refused.setdefault(reason, plan.describe_axes())
            self._asked.refuse(reason)
        return reason is not None

    def _may_pipe(self, inner: Plan, pipe: Pipe) -> bool:
        """Does the model allow the pipeline around the settings of `inner`, whatever the other axes and micro-batches?

        The answer is the same for all micro-batches.
        """
        key = pipe, inner.changed(micro_batch=None)
        if pipe.degree > 1 and key not in self._reasons:
            self._reasons[key] = self._reason(key[1].changed(pipe=pipe))
        reason = self._reasons.get(key)
        return reason is None or not self._refuses(inner.changed(pipe=pipe), reason)

    def _lay_out(self, inner: Plan) -> None:
        """Tries all pipelines around the settings of `inner` later, in the order of their bounds."""
        room, batch = self.num_devices // inner.num_ranks, self.question.batch
        assert inner.micro_batch is not None
        for degree in divisors(room):
            ranks = room // degree
            if degree > self.model.num_blocks:
                break
            num_samples = ranks * inner.num_batch_ranks * inner.micro_batch  # of one micro-batch on all ranks
            if batch % num_samples:
                continue
            for pipe in self._pipes(degree, inner):
                if not self._is_slow(bound := self._pipe_bound(inner, pipe, batch // num_samples)):
                    self._try_later(bound, self._pipeline, inner, pipe, ranks, batch // num_samples)

    def _pipe_bound(self, inner: Plan, pipe: Pipe, num_micro_batches: int) -> float:
        """A lower bound of a step with a pipeline around the settings of `inner`, with any stages."""
        return 0.0

    def _pipeline(self, inner: Plan, pipe: Pipe, ranks: int, num_micro_batches: int) -> None:
        """Tries a pipeline around the settings of `inner` later, in the order of the bound with its stages."""
        plan = self._asked.piped(inner.changed(pipe=pipe, shard=Shard(ranks)))
        if (reason := schedule_refusal(plan, num_micro_batches)) is not None and self._refuses(plan, reason):
            return
        common = self.model.common(plan, num_micro_batches)
        if not self._is_slow(bound := common.least_seconds):
            self._try_later(bound, self._divide, inner.changed(pipe=pipe), plan, common)

    def _divide(self, inner: Plan, plan: Plan, common: CommonCosts) -> None:
        """Tries a plan with its ranks of shard divided over data and shard in all ways.

        `common` are the costs that these plans share, unless the question asks for fields that change them. `inner` is
        the plan without these ranks and fields.
        """
        if not self._may_pipe(inner.changed(pipe=Pipe()), inner.pipe):
            return
        ranks, num_micro_batches = plan.shard.degree, common.num_micro_batches
        shared = None if self._asked.fields else common
        for shard in divisors(ranks):
            for stage in (1, 2, 3) if shard > 1 else (1,):
                divided = plan.changed(data=ranks // shard, shard=Shard(shard, stage))  # type: ignore[arg-type]
                made = self._with_asked(divided, num_micro_batches)
                if made is not None and self._asked.holds_outer(made) and self._allows(made, num_micro_batches):
                    shared = shared or self.model.common(made, num_micro_batches)
                    self._consider(made, shared)

    def _with_asked(self, plan: Plan, num_micro_batches: int) -> Plan | None:
        """Returns the plan with the fields that the question asks for and the search does not try by itself.

        Returns None, and remembers the reason, if such a plan is refused.
        """
        if not self._asked.fields:
            return plan
        try:
            plan = with_fields(plan, self._asked.fields)
            reason = schedule_refusal(plan, num_micro_batches)
        except PlanError as error:
            reason = str(error)
        return None if self._refuses(plan, reason) else plan

    def _is_slow(self, seconds: float) -> bool:
        """Are enough plans faster than `seconds`, or is the limit lower? Equally fast plans are of interest."""
        if seconds >= self.limit_seconds:
            return True
        return len(self._best) >= self._num_sure and seconds > self._best[self._num_sure - 1].seconds * (1 + SAME)

    def _seconds(self, candidate: Candidate) -> float:
        return self.steps.step_seconds(candidate.plan, candidate.num_micro_batches)

    def _time(self, candidate: Candidate) -> Candidate:
        step = self.model.step(candidate.plan, candidate.num_micro_batches)
        return replace(candidate, seconds=step.seconds, step=step)

    def _try_smaller(self, plan: Plan, common: CommonCosts) -> None:
        """Tries a plan that does not fit in forms that need less memory."""
        for form, costs in self._smaller.fitting(plan, common):
            self._consider(form, costs)

    def _consider(self, plan: Plan, common: CommonCosts) -> None:
        """Times a plan that fits later, and tries one that does not in smaller forms."""
        self.num_considered += 1
        bound = common.least_seconds_of(plan)
        if self._is_slow(bound):
            return  # if it does not fit, it is not worth reporting either
        candidate = Candidate(plan, common.num_micro_batches, bound, common.memory(plan))
        found: Candidate | None = candidate
        is_large = candidate.memory.total_bytes > self.limit_bytes
        if is_large:
            self._large.append(candidate)
        is_capped = plan.pipe.in_flight is not None and IN_FLIGHT not in self._names
        if is_large and not plan.tensor.regather and not is_capped:
            self._try_later(bound, self._try_smaller, plan, common)
        if is_large or self._shares[:1] != [0.0]:
            found = offloaded(candidate, common, self._shares, self.steps.cluster.node)
        if found is not None:
            self._try_later(common.least_seconds_of(found.plan), self._run_schedule, found, common)

    def _run_schedule(self, candidate: Candidate, common: CommonCosts) -> None:
        """Keeps a plan that fits later, when no bound is lower than that for which its schedule is run."""
        self._try_later(common.least_seconds_of(candidate.plan, is_closer=True), self._keep, candidate, common)

    def _keep(self, candidate: Candidate, common: CommonCosts) -> None:
        """Times a plan that fits, and keeps it if it is among the fastest."""
        if self._refuses(candidate.plan):
            return
        plan, count = candidate.plan, candidate.num_micro_batches
        is_copied = plan.memory.activations > 0 or plan.memory.weights > 0
        found = replace(candidate, seconds=self.model.step(plan, count).seconds if is_copied else common.seconds(plan))
        if not self._is_slow(found.seconds):
            insort(self._best, found, key=rank)
            del self._best[self._room :]


class TextSearch(Search):
    """Searches over pipeline schedules with equal blocks."""

    def _reason(self, plan: Plan) -> str | None:
        reason, tensor = super()._reason(plan), plan.tensor
        if reason is None and tensor.x * tensor.y > 1 and not self._are_blocks_split:
            given = f"tensor.x = {tensor.x}" if tensor.y == 1 else f"tensor.y = {tensor.y}"
            return (
                f"{given} splits the embedding and the head only, and the layers of block "
                f"'{self.model.profile.blocks[-1].name}' stay whole, for which a search has no times; use data, shard "
                f"or pipe, or write the plan yourself"
            )
        return reason

    @cached_property
    def _are_blocks_split(self) -> bool:
        """Can the tensor axes split layers inside of blocks?"""
        pairing = self.model.profile.pairing
        return any(pairing.block_of(one.module) is not None for one in pairing.splits.values())

    def _pipes(self, degree: int, inner: Plan) -> list[Pipe]:
        if degree == 1:
            return [Pipe()]
        if "pipe.schedule" in self._names or "pipe.chunks" in self._names:
            return self._asked_pipes(degree)
        found = [Pipe(degree)]
        found += [Pipe(degree, "interleaved", chunks=c) for c in (2, 4) if degree * c <= self.model.num_blocks]
        if inner.tensor.x * inner.tensor.y == 1:
            found.append(Pipe(degree, "zero-bubble"))
        return found

    def _pipe_bound(self, inner: Plan, pipe: Pipe, num_micro_batches: int) -> float:
        if self._asked.fields:  # which may change the schedule, or recompute in some stages only
            return 0.0
        seconds, share = sum(self.steps.chain(inner)) * ROUNDING, float(pipe.schedule == "1f1b")
        return least_with_any_stages(seconds, pipe.degree, num_micro_batches, share)

    def _asked_pipes(self, degree: int) -> list[Pipe]:
        """Every schedule, and any number of stages on each rank, for questions that ask for one."""
        most = self.model.num_blocks // degree
        found = [Pipe(degree, name) for name in SCHEDULES if name != "interleaved"]  # type: ignore[arg-type]
        found += [Pipe(degree, "interleaved", chunks=chunks) for chunks in range(2, most + 1)]
        return [pipe for pipe in found if self._asked.holds_pipe(Plan(pipe=pipe))]
