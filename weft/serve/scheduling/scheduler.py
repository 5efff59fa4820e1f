"""Which tokens of which requests the next step computes: decodes first, then prompts in chunks, within a token budget.

Requests are served in the order of their arrival. When a decode finds no free block, the request that arrived last is
sent back to the queue. Its keys and values are copied to host memory and back if there is `swap` with room for them;
else they are computed again later, those of its generated tokens included. The oldest request is never sent back,
so every request ends. Without torch.

With several stages, as many steps are under way as stages, each with its share of the decodes. A request whose next
token is being computed waits for it.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from weft.serve.scheduling.blocks import HeldBlocks, PagedBlocks
from weft.serve.scheduling.request import Request

if TYPE_CHECKING:
    from weft.serve.scheduling.grammar import AnswerMatcher


@dataclass(eq=False)
class ActiveRequest:
    """A request that waits or runs.

    A step may be launched before the tokens of the step before it are read: those tokens are on the device alone.
    """

    request: Request
    arrival: int
    max_length: int  # of its tokens, prompt and answer together, when it ends
    seed: int
    tokens: list[int] = field(default_factory=list)  # the prompt and the generated tokens that were read
    num_unread: int = 0  # tokens that were sampled in steps whose results are not read
    num_computed: int = 0  # tokens whose keys and values are in the cache, or will be after the steps launched
    held: HeldBlocks | None = None  # None: it waits
    row: int = -1  # its place in the sampler's tables while it runs
    has_new_row: bool = False  # the sampler does not know of it yet
    is_done: bool = False
    num_cached: int | None = None  # tokens of the prompt that the prefix cache had when it first ran
    num_swapped: int = 0  # tokens whose keys and values are in host memory while it waits
    matcher: AnswerMatcher | None = None  # of a request with a schema

    @property
    def length(self) -> int:
        return len(self.tokens) + self.num_unread


class ScheduledChunk(NamedTuple):
    """The tokens `start` to `end` of a request, which a step computes, and `drafts` that may follow them.

    If it `samples`, the next token is sampled after the last one, and after each draft (`speculation.py`).
    """

    active: ActiveRequest
    start: int
    end: int
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return self.end - self.start + len(self.drafts)

    @property
    def num_rows(self) -> int:
        """Rows of logits that are sampled."""
        return 1 + len(self.drafts) if self.samples else 0


class PageSwap(Protocol):
    """Host memory for blocks of requests that wait."""

    keeps_whole_blocks: bool  # tokens of a block that is not full are computed again

    def save(self, owner: Hashable, blocks: Sequence[int]) -> bool:
        """Copy blocks to host memory; False if there is no room."""

    def load(self, owner: Hashable, blocks: Sequence[int], first: int) -> None:
        """Copy what was saved, from its block number `first` on, into these blocks, and forget it."""

    def drop(self, owner: Hashable) -> None:
        """Forget what was saved."""


class Scheduler:
    """The requests that the engine holds, and the blocks that they use."""

    def __init__(
        self,
        policy: PagedBlocks,
        token_budget: int,
        max_running: int,
        num_stages: int = 1,
        swap: PageSwap | None = None,
        shares_answers: bool = True,
    ) -> None:
        """`shares_answers`: a block with generated tokens may be shared with prompts that have the same tokens."""
        self.policy = policy
        self._shares_answers = shares_answers
        self.swap = swap
        self.token_budget = token_budget
        self.max_running = min(max_running, token_budget)  # so that all decodes fit the budget
        self.running: list[ActiveRequest] = []  # in the order of arrival, as is `waiting`
        self.waiting: deque[ActiveRequest] = deque()
        self.num_preempted = 0
        self.num_swapped = 0
        self.num_prefix_tokens = 0
        self._num_stages = num_stages
        self._free_rows = list(range(self.max_running))

    def add(self, active: ActiveRequest) -> None:
        self.waiting.append(active)

    def schedule(self) -> list[ScheduledChunk]:
        """Returns the chunks of the next step, decodes first. They count as computed from now on."""
        num_before = self.num_preempted
        chunks = self._decodes()
        budget = self.token_budget - len(chunks)
        for active in self.running:
            if budget and active.length - active.num_computed > 1:
                chunks.append(self._chunk(active, budget))
                budget -= chunks[-1].end - chunks[-1].start
        while budget and self.num_preempted == num_before and self._admit():
            chunks.append(self._chunk(self.running[-1], budget))
            budget -= chunks[-1].end - chunks[-1].start
        return chunks

    def preempt(self, active: ActiveRequest) -> None:
        """Send a running request back to the queue. Its keys and values go to host memory, or are lost."""
        self._save(active)
        self._release(active)
        self.running.remove(active)
        active.num_computed = 0
        insort(self.waiting, active, key=lambda one: one.arrival)
        self.num_preempted += 1

    def lend(self, tokens: Sequence[int]) -> HeldBlocks:
        """Takes blocks for a text of no request; give them back to the policy. None of them is shared. Requests that
        arrived last are sent back to the queue for them. The cache must hold the text.
        """
        while (held := self.policy.allocate(tokens, "", num_shared=0)) is None:
            self.preempt(self.running[-1])
        return held

    def forget(self) -> None:
        """Send all requests back to the queue, and have everything computed again."""
        for active in reversed(list(self.running)):
            self.preempt(active)
        for active in self.waiting:
            self._drop(active)
        self.policy.forget()

    def end(self, active: ActiveRequest, is_shared: bool = True) -> None:
        """Let go of a request that is done or cancelled. Unless `is_shared`, no later request shares its blocks."""
        active.is_done = True
        if not is_shared:
            self.policy.unshare(active.tokens, _cache_name(active.request))
        if active.held is None:
            self._drop(active)
            self.waiting.remove(active)
        else:
            self._release(active)
            self.running.remove(active)

    def _decodes(self) -> list[ScheduledChunk]:
        chunks: list[ScheduledChunk] = []
        most = -(-len(self.running) // self._num_stages)
        for active in list(self.running):
            length = active.length
            if length - active.num_computed != 1 or length >= active.max_length or self._is_on_its_way(active):
                continue  # its prompt is not computed, or its last token is sampled, but not read
            if len(chunks) == most:
                break
            if active.held is not None and self._make_room(active, active.held):
                active.num_computed = length
                active.num_unread += 1
                chunks.append(ScheduledChunk(active, length - 1, length, True))
        return chunks

    def _make_room(self, active: ActiveRequest, held: HeldBlocks) -> bool:
        """Get a block for the next token. Requests that arrived later are sent back for it, or else this one is."""
        while not self.policy.append(held, active.length):
            last = self.running[-1]
            if self._is_on_its_way(last):
                return False  # there is room when its token has come
            self.preempt(last)
            if last is active:
                return False
        return True

    def _is_on_its_way(self, active: ActiveRequest) -> bool:
        """Is the request's next token still being computed by a stage?"""
        return self._num_stages > 1 and active.num_unread > 0

    def _admit(self) -> bool:
        """Let the first waiting request run, if blocks are free for its tokens and one for each running request."""
        if not self.waiting or not self._free_rows:
            return False
        active = self.waiting[0]
        if self._is_on_its_way(active):
            return False
        num_shared = None if self._shares_answers else len(active.request.tokens)
        held = self.policy.allocate(active.tokens, _cache_name(active.request), len(self.running), num_shared)
        if held is None:
            return False
        self.waiting.popleft()
        active.held, active.num_computed = held, held.num_cached
        if active.num_cached is None:
            active.num_cached = held.num_cached
        active.row, active.has_new_row = self._free_rows.pop(), True
        self.num_prefix_tokens += held.num_cached
        self._load(active, held)
        self.running.append(active)
        return True

    def _chunk(self, active: ActiveRequest, budget: int) -> ScheduledChunk:
        start, end = active.num_computed, min(active.length, active.num_computed + budget)
        samples = end == active.length
        active.num_computed = end
        active.num_unread += samples
        return ScheduledChunk(active, start, end, samples)

    def _save(self, active: ActiveRequest) -> None:
        if self.swap is None or active.held is None:
            return
        size, number = self.policy.block_size, active.num_computed
        if self.swap.keeps_whole_blocks:
            number = number // size * size
        if number and self.swap.save(active, active.held.blocks[: -(-number // size)]):
            active.num_swapped = number
            self.num_swapped += 1

    def _load(self, active: ActiveRequest, held: HeldBlocks) -> None:
        """Bring keys and values back that the prefix cache does not have."""
        if self.swap is None or active.num_swapped <= held.num_cached:
            self._drop(active)
            return
        first, size = held.num_cached // self.policy.block_size, self.policy.block_size
        self.swap.load(active, held.blocks[first : -(-active.num_swapped // size)], first)
        active.num_computed, active.num_swapped = active.num_swapped, 0

    def _drop(self, active: ActiveRequest) -> None:
        if self.swap is not None and active.num_swapped:
            self.swap.drop(active)
            active.num_swapped = 0

    def _release(self, active: ActiveRequest) -> None:
        assert active.held is not None
        self.policy.free(active.held)
        self._free_rows.append(active.row)
        active.held, active.row = None, -1


def _cache_name(request: Request) -> str:
    """Returns a name that is equal for requests that may share blocks: keys and values depend on the adapter."""
    return f"{len(request.adapter)} {request.adapter}{request.tenant}"
