"""Blocks and scheduler under random requests, cancels and shortage of memory, with a model that is simulated.

The simulated cache stores, for each token, the tenant and all tokens up to it; a step checks what it would read.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.serve.scheduling.blocks import PagedBlocks
from weft.serve.scheduling.request import Request
from weft.serve.scheduling.scheduler import ActiveRequest, ScheduledChunk, Scheduler

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)  # two tokens: equal beginnings are frequent
REQUESTS = st.lists(
    st.tuples(PROMPTS, st.integers(1, 6), st.sampled_from(["a", "b"]), st.integers(0, 12), st.integers(-20, 12)),
    min_size=1,
    max_size=8,
)  # prompt, max_tokens, tenant, the step of its arrival, steps until it is cancelled (never if negative)


HOST = st.sampled_from([0, 3, 100])  # blocks of host memory
Memory = dict[tuple[int, int], tuple[str, list[int]]]  # (block, offset) -> tenant, and all tokens up to this one


def next_token(tokens: list[int]) -> int:
    return sum(index * token for index, token in enumerate(tokens)) % 2


class SimulatedHost:
    """Host memory of `num_blocks` blocks; it holds copies of the simulated cache's entries."""

    keeps_whole_blocks = False

    def __init__(self, memory: Memory, num_blocks: int) -> None:
        self.memory, self.num_free = memory, num_blocks
        self.saved: dict[Hashable, list[Memory]] = {}

    def save(self, owner: Hashable, blocks: Sequence[int]) -> bool:
        assert owner not in self.saved
        if len(blocks) > self.num_free:
            return False
        self.num_free -= len(blocks)
        self.saved[owner] = [{key: self.memory[key] for key in self.memory if key[0] == block} for block in blocks]
        return True

    def load(self, owner: Hashable, blocks: Sequence[int], first: int) -> None:
        for block, entries in zip(blocks, self.saved[owner][first:], strict=True):
            self.memory.update({(block, offset): entry for (_, offset), entry in entries.items()})
        self.drop(owner)

    def drop(self, owner: Hashable) -> None:
        self.num_free += len(self.saved.pop(owner))


class SimulatedEngine:
    """Steps of the scheduler. With `overlap`, the tokens of a step are read after the next one is launched."""

    def __init__(
        self, num_blocks: int, block_size: int, budget: int, max_running: int, overlap: bool, num_host: int
    ) -> None:
        self.memory: Memory = {}
        self.host = SimulatedHost(self.memory, num_host)
        policy = PagedBlocks(num_blocks, block_size)
        self.scheduler = Scheduler(policy, budget, max_running, swap=self.host if num_host else None)
        self.overlap = overlap
        self.in_flight: list[tuple[ScheduledChunk, int]] = []

    def place(self, active: ActiveRequest, position: int) -> tuple[int, int]:
        assert active.held is not None
        size = self.scheduler.policy.block_size
        return active.held.blocks[position // size], position % size

    def step(self) -> None:
        running = self.scheduler.running
        decodes = [a for a in running if a.length - a.num_computed == 1 and a.length < a.max_length]
        chunks = self.scheduler.schedule()
        decodes = [active for active in decodes if active.held is not None]  # the others were sent back
        assert [chunk.active for chunk in chunks[: len(decodes)]] == decodes
        sizes = [chunk.end - chunk.start for chunk in chunks]
        assert sum(sizes) <= self.scheduler.token_budget
        launched = []
        for chunk in chunks:
            active = chunk.active
            known = active.tokens + [next_token(active.tokens)] * (chunk.end - len(active.tokens))
            for position in range(chunk.start, chunk.end):
                self.memory[self.place(active, position)] = (active.request.tenant, known[: position + 1])
            for position in range(chunk.end):  # what attention reads
                assert self.memory[self.place(active, position)] == (active.request.tenant, known[: position + 1])
            launched.append((chunk, next_token(known[: chunk.end])))
        assert chunks or self.in_flight or not (running or self.scheduler.waiting)  # work goes on
        ready, self.in_flight = (self.in_flight, launched) if self.overlap else (launched, [])
        for chunk, token in ready:
            self.read(chunk, token)

    def read(self, chunk: ScheduledChunk, token: int) -> None:
        active = chunk.active
        if active.is_done:
            return
        if chunk.samples:
            active.tokens.append(token)
            active.num_unread -= 1
        if active.held is not None:
            self.scheduler.policy.record(active.held, active.tokens, chunk.end)
        if len(active.tokens) == active.max_length:
            self.scheduler.end(active)


@settings(max_examples=40, deadline=None)
@given(REQUESTS, st.integers(1, 3), st.integers(0, 14), st.integers(1, 9), st.integers(1, 4), st.booleans(), HOST)
def test_every_request_ends_with_its_own_tokens_and_every_block_comes_back(
    requests: list[tuple[list[int], int, str, int, int]],
    block_size: int,
    num_more: int,
    budget: int,
    max_running: int,
    overlap: bool,
    num_host: int,
) -> None:
    num_blocks = max(-(-(len(prompt) + more) // block_size) for prompt, more, *_ in requests) + num_more
    engine = SimulatedEngine(num_blocks, block_size, budget, max_running, overlap, num_host)
    scheduler, policy = engine.scheduler, engine.scheduler.policy
    all_active = [
        ActiveRequest(Request(str(i), tuple(prompt), more, tenant=tenant), i, len(prompt) + more, 0, list(prompt))
        for i, (prompt, more, tenant, _, _) in enumerate(requests)
    ]
    arrived = list[ActiveRequest]()
    cancelled = set[ActiveRequest]()
    last_arrival = max(arrival for *_, arrival, _ in requests)
    for step in range(1000):
        for active, (*_, arrival, cancel) in zip(all_active, requests, strict=True):
            if step == arrival:
                active.arrival = len(arrived)
                arrived.append(active)
                scheduler.add(active)
            if cancel >= 0 and step == arrival + cancel and not active.is_done:
                scheduler.end(active)
                cancelled.add(active)
        if step > last_arrival and not scheduler.running and not scheduler.waiting:
            break
        engine.step()
        held = {block for active in scheduler.running if active.held for block in active.held.blocks}
        assert len(held) + policy.num_free == num_blocks
        assert set(engine.host.saved) == {active for active in scheduler.waiting if active.num_swapped}
    else:
        pytest.fail("requests wait for ever")
    assert policy.num_free == num_blocks
    assert engine.host.num_free == num_host
    for active, (prompt, more, *_) in zip(all_active, requests, strict=True):
        expected = list(prompt)
        for _ in range(more):
            expected.append(next_token(expected))
        assert active.tokens == expected or (active in cancelled and active.tokens == expected[: len(active.tokens)])


def test_a_prompt_is_shared_with_its_tenant_alone_and_until_the_weights_change() -> None:
    blocks = PagedBlocks(num_blocks=20, block_size=2)
    first = blocks.allocate([1, 2, 3, 4, 5], "a")
    assert first is not None
    blocks.record(first, [1, 2, 3, 4, 5], 5)
    assert blocks.num_free == 17
    same, longer, other = (
        blocks.allocate([1, 2, 3, 4, *more], who) for more, who in (([], "a"), ([6], "a"), ([], "b"))
    )
    assert same is not None
    assert longer is not None
    assert other is not None
    assert (same.num_cached, longer.num_cached, other.num_cached) == (2, 4, 0)  # the last token is always computed
    assert longer.blocks[:2] == first.blocks[:2]
    blocks.free(first)
    assert blocks.allocate([1, 2, 3], "a").num_cached == 2  # type: ignore[union-attr]
    blocks.forget()
    assert blocks.allocate([1, 2, 3], "a").num_cached == 0  # type: ignore[union-attr]


def test_without_room_nothing_is_taken() -> None:
    blocks = PagedBlocks(num_blocks=3, block_size=2)
    held = blocks.allocate([1, 2, 3], "")
    assert held is not None
    assert blocks.allocate([4], "", reserve=1) is None
    assert not blocks.append(held, 7)
    assert (blocks.num_free, len(held.blocks)) == (1, 2)


def test_a_request_is_admitted_if_those_that_run_can_go_on() -> None:
    scheduler = Scheduler(PagedBlocks(num_blocks=4, block_size=2), token_budget=8, max_running=4)
    old, new = (ActiveRequest(Request(str(i), (i,) * 3, 9), i, 12, 0, [i] * 3) for i in range(2))
    scheduler.add(old)
    scheduler.schedule()
    scheduler.add(new)
    assert [chunk.active for chunk in scheduler.schedule()] == [old]
    assert new.held is None  # its two blocks are free, but one of them is kept for the request that runs
    scheduler.end(old)
    assert [chunk.active for chunk in scheduler.schedule()] == [new]


def test_a_request_that_gave_way_comes_back_in_a_later_step() -> None:
    """Also where it held more blocks than it needs, as drafts do that were rejected."""
    blocks = PagedBlocks(num_blocks=8, block_size=1, prefix_cache=False)
    scheduler = Scheduler(blocks, token_budget=8, max_running=2)
    old, new = (ActiveRequest(Request(str(i), (i,) * (2 - i), 9), i, 12, 0, [i] * (2 - i)) for i in range(2))
    for active in (old, new):
        scheduler.add(active)
    assert [chunk.active for chunk in scheduler.schedule()] == [old, new]
    for active in (old, new):
        active.tokens.append(0)
        active.num_unread = 0
    assert new.held is not None
    assert blocks.append(new.held, 6)
    assert [chunk.active for chunk in scheduler.schedule()] == [old]
    assert scheduler.num_preempted == 1
    old.tokens.append(0)
    old.num_unread = 0
    assert [chunk.active for chunk in scheduler.schedule()] == [old, new]


def test_blocks_that_a_text_is_lent_are_no_others() -> None:
    blocks, tokens = PagedBlocks(num_blocks=8, block_size=2), [1, 2, 3, 4, 5]
    kept = blocks.allocate(tokens, "")
    assert kept is not None
    blocks.record(kept, tokens, 5)
    lent = Scheduler(blocks, token_budget=8, max_running=2).lend(tokens)
    assert not set(lent.blocks) & set(kept.blocks)


def test_prompts_are_shared_under_one_adapter_and_tenant_alone() -> None:
    """Whose names may begin alike: key 10 of the adapter `x`, and key 0 of the adapter `x1`."""
    blocks, tokens = PagedBlocks(num_blocks=20, block_size=2), (1, 2, 3, 4, 5)
    scheduler = Scheduler(blocks, token_budget=20, max_running=4)
    for number, (adapter, tenant, num_cached) in enumerate((("x", "10/", 0), ("x1", "0/", 0), ("x", "10/", 4))):
        request = Request(str(number), tokens, 9, tenant=tenant, adapter=adapter)
        active = ActiveRequest(request, number, 14, 0, list(tokens))
        scheduler.add(active)
        scheduler.schedule()
        assert active.held is not None
        assert active.held.num_cached == active.num_cached == num_cached
        blocks.record(active.held, tokens, 5)


def test_ends_of_prompts_are_reused_before_their_beginnings() -> None:
    blocks = PagedBlocks(num_blocks=6, block_size=2)
    held = blocks.allocate([1, 2, 3, 4, 5, 6, 7], "a")
    assert held is not None
    blocks.record(held, [1, 2, 3, 4, 5, 6, 7], 7)
    blocks.free(held)
    assert blocks.allocate([9] * 8, "b") is not None  # takes the two free ones, the last one and the end of the prompt
    again = blocks.allocate([1, 2, 3, 4], "a")
    assert again is not None
    assert again.num_cached == 2
