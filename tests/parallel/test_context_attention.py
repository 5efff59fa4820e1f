"""Attention over a split sequence, held to one masked softmax over the whole of it.

Every rank computes the reference by itself, in float64, and compares its own rows of the result and of the gradients of
query, key and value. The negative controls break one thing each and must be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close
from torch.utils._python_dispatch import TorchDispatchMode

from weft.comm import Axis, Ledger, Pending, shift
from weft.launch.local_ranks import run_local
from weft.parallel.context import attention as context_attention
from weft.parallel.context import block_attention
from weft.parallel.context.attention import (
    Calls,
    all_to_all_attention,
    all_to_all_traffic,
    gather_documents,
    ring_attention,
    ring_traffic,
    visible_block,
    zigzag,
)
from weft.parallel.context.block_attention import Mask, Rows
from weft.strategy import tally

pytestmark = pytest.mark.processes

Attention = Callable[..., Tensor]
KINDS: dict[str, Attention] = {"ring": ring_attention, "all-to-all": all_to_all_attention}
BATCH, HEADS, HEAD_DIM = 2, 4, 8
TOLERANCE = 1e-12
every_kind = pytest.mark.parametrize("kind", KINDS)


@dataclass(frozen=True)
class Case:
    """One attention to compare. `chunk` rows in each of the 2 * degree chunks; `tile` is set small to have many."""

    heads: int = HEADS
    kv_heads: int = HEADS
    chunk: int = 6
    tile: int = 4
    window: int | None = None
    documents: bool = False
    scale: float | None = None
    fused: bool = True


CASES = {
    "torch's kernels": Case(),
    "tiles": Case(fused=False),
    "tiles, two key heads": Case(kv_heads=2, fused=False),
    "two key heads": Case(kv_heads=2),
    "one key head": Case(kv_heads=1, scale=0.7),
    "chunks of one row": Case(chunk=1, kv_heads=2),
    "chunks of one row in tiles": Case(chunk=1, fused=False),
    "documents": Case(documents=True),
    "documents, one key head": Case(documents=True, kv_heads=1, scale=0.7),
    "window of one": Case(window=1),
    "window inside a chunk": Case(window=3, kv_heads=2),
    "window over chunks": Case(window=17),
    "window over everything": Case(window=1000),
    "window and documents": Case(window=5, documents=True, kv_heads=2, tile=1024),
    "window and documents in chunks of one": Case(chunk=1, window=2, documents=True),
}


# --- the reference


def random_inputs(case: Case, degree: int) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """[query, key, value], document ids and the gradient of the result: of the whole sequence, alike on all ranks."""
    generator = torch.Generator().manual_seed(0)
    sequence = 2 * degree * case.chunk
    counts = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    *inputs, grad_out = (
        torch.randn(BATCH, count, sequence, HEAD_DIM, dtype=torch.float64, generator=generator) for count in counts
    )
    # Runs of a few rows, as packing makes them, and -1 at the end, as padding does: an id like any other.
    starts = torch.rand(BATCH, sequence, generator=generator) < 0.2
    documents = starts.cumsum(1)
    documents[:, sequence - sequence // 4 :] = -1
    return inputs, documents if case.documents else None, grad_out


def reference(inputs: list[Tensor], grad_out: Tensor, case: Case, documents: Tensor | None) -> list[Tensor]:
    """The result and the gradients of query, key and value, by one softmax under an explicit mask."""
    query, key, value = (tensor.clone().requires_grad_() for tensor in inputs)
    group, sequence = case.heads // case.kv_heads, query.shape[2]
    scale = HEAD_DIM**-0.5 if case.scale is None else case.scale
    positions = torch.arange(sequence)
    distance = positions[:, None] - positions
    seen = (distance >= 0) & (distance < (case.window or sequence))
    if documents is not None:
        seen = seen & (documents[:, None, :, None] == documents[:, None, None, :])
    scores = query @ key.repeat_interleave(group, 1).mT * scale
    out = scores.masked_fill(~seen, -torch.inf).softmax(-1) @ value.repeat_interleave(group, 1)
    return [out.detach(), *torch.autograd.grad((out * grad_out).sum(), (query, key, value))]


# --- on each rank


def make_axis(rank: int, degree: int) -> Axis:
    """The whole world as one axis."""
    return Axis("context", degree, rank, dist.group.WORLD if degree > 1 else None, Ledger())


def run_kind(
    kind: str, inputs: list[Tensor], grad_out: Tensor, case: Case, documents: Tensor | None, axis: Axis
) -> Any:
    """The result and the three gradients of one rank, from its own rows."""
    block_attention.TILE = case.tile
    if not case.fused:
        block_attention._can_fuse = lambda *_: False
    own = [tensor.clone().requires_grad_() for tensor in inputs]
    out = KINDS[kind](*own, axis, Mask(case.window, documents), case.scale)
    return [out.detach(), *torch.autograd.grad((out * grad_out).sum(), own)]


def differences(kind: str, case: Case, rank: int, degree: int, rows: Tensor | None = None) -> list[float]:
    """The largest differences from the reference in out, dQ, dK and dV; `rows` are those that the rank is given."""
    axis = make_axis(rank, degree)
    inputs, documents, grad_out = random_inputs(case, degree)
    expected = reference(inputs, grad_out, case, documents)
    rows = zigzag(grad_out.shape[2], degree, rank) if rows is None else rows
    found = run_kind(kind, [tensor[:, :, rows] for tensor in inputs], grad_out[:, :, rows], case, documents, axis)
    assert [tensor.shape for tensor in found] == [tensor[:, :, rows].shape for tensor in expected]
    return [(a - b[:, :, rows]).abs().max().item() for a, b in zip(found, expected, strict=True)]


def check_cases(kind: str, degree: int, cases: dict[str, Case]) -> None:
    def rank_function(rank: int) -> dict[str, list[float]]:
        fused = block_attention._can_fuse
        found = {}
        for name, case in cases.items():
            block_attention._can_fuse = fused
            found[name] = differences(kind, case, rank, degree)
        return found

    for rank, found in enumerate(run_local(rank_function, degree)):
        for name, worst in found.items():
            assert max(worst) < TOLERANCE, f"{name}: rank {rank} differs by {worst} in out, dQ, dK, dV"


# --- exactness


@every_kind
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_equals_one_softmax(kind: str, degree: int) -> None:
    check_cases(kind, degree, CASES)


@every_kind
@pytest.mark.soak
def test_equals_one_softmax_on_eight_ranks(kind: str) -> None:
    cases = CASES if kind == "ring" else {name: Case(**{**vars(case), "heads": 8}) for name, case in CASES.items()}
    check_cases(kind, 8, cases)


def test_all_to_all_repeats_key_heads_just_enough() -> None:
    """Six key heads on four ranks: each key head twice, three on each rank, none shared by query heads of two."""
    check_cases("all-to-all", 4, {"6 of 12": Case(heads=12, kv_heads=6), "3 of 12": Case(heads=12, kv_heads=3)})


@every_kind
def test_takes_views_as_the_model_gives_them(kind: str) -> None:
    """[batch, sequence, heads, head_dim] transposed, as the projections leave them, and a gradient laid out so too."""

    def rank_function(rank: int) -> list[float]:
        case, axis = Case(kv_heads=2), make_axis(rank, 2)
        inputs, _, grad_out = random_inputs(case, 2)
        rows = zigzag(grad_out.shape[2], 2, rank)
        expected = reference(inputs, grad_out, case, None)
        views = [tensor[:, :, rows].transpose(1, 2).contiguous().transpose(1, 2) for tensor in (*inputs, grad_out)]
        found = run_kind(kind, views[:3], views[3], case, None, axis)
        return [(a - b[:, :, rows]).abs().max().item() for a, b in zip(found, expected, strict=True)]

    assert max(max(worst) for worst in run_local(rank_function, 2)) < TOLERANCE


@every_kind
def test_bfloat16_is_as_near_as_its_rounding(kind: str) -> None:
    """Results in the inputs' dtype, sums in float32: as near to float64 as a few roundings of 2**-9."""

    def rank_function(rank: int) -> list[float]:
        worst = []
        for case in (Case(kv_heads=2), Case(kv_heads=2, fused=False)):
            axis = make_axis(rank, 4)
            inputs, _, grad_out = random_inputs(case, 4)
            rows = zigzag(grad_out.shape[2], 4, rank)
            rounded = [tensor.bfloat16() for tensor in (*inputs, grad_out)]
            wide = [tensor.double() for tensor in rounded]
            expected = reference(wide[:3], wide[3], case, None)
            own = [tensor[:, :, rows] for tensor in rounded]
            found = run_kind(kind, own[:3], own[3], case, None, axis)
            assert all(tensor.dtype == torch.bfloat16 for tensor in found)
            for a, b in zip(found, expected, strict=True):
                worst.append(((a.double() - b[:, :, rows]).abs().max() / b.abs().max()).item())
        return worst

    worst = [difference for answer in run_local(rank_function, 4) for difference in answer]
    assert max(worst) < 0.02
    assert max(worst) > 1e-6  # it did run in bfloat16


@pytest.mark.parametrize("form", ["expanded", "turned"])
def test_kernels_get_a_gradient_with_elements_of_its_own(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum gives its terms one number, with strides of 0, which kernels of GPUs need not read as it is."""
    strides = []
    inner = block_attention._flash_backward

    def watched(result: block_attention.AttentionResult, *args: Any) -> Any:
        strides.append(result.grad_out.stride())
        return inner(result, *args)

    monkeypatch.setattr(block_attention, "_flash_backward", watched)
    gradients = []
    for how in (form, "plain"):
        generator = torch.Generator().manual_seed(0)
        query, key, value = (torch.randn(2, 4, 16, 8, generator=generator).requires_grad_() for _ in range(3))
        out = ring_attention(query, key, value, make_axis(0, 1))
        gradient = torch.full(out.shape, 0.5) if form == "expanded" else torch.randn(out.shape, generator=generator)
        if how == "expanded":
            gradient = torch.tensor(0.5).expand(out.shape)
        elif how == "turned":
            gradient = gradient.transpose(2, 3).contiguous().transpose(2, 3)
        out.backward(gradient)
        gradients.append([one.grad for one in (query, key, value)])
    assert all(stride[-1] == 1 and 0 not in stride for stride in strides)
    assert_close(*gradients)


def test_gathers_documents_into_the_order_of_the_sequence() -> None:
    def rank_function(rank: int) -> Any:
        axis = make_axis(rank, 4)
        whole = torch.arange(BATCH * 24).view(BATCH, 24)
        gathered = gather_documents(whole[:, zigzag(24, 4, rank)], axis)
        traffic = [[*key, value.calls, value.num_bytes] for key, value in axis.ledger]
        return [torch.equal(gathered, whole), traffic]

    assert run_local(rank_function, 4) == [[True, [["context", "all_gather", 1, BATCH * 24 * 8]]]] * 4


def test_documents_must_be_those_of_the_whole_sequence() -> None:
    def rank_function(rank: int) -> bool:
        inputs, documents, _ = random_inputs(Case(documents=True), 2)
        rows = zigzag(inputs[0].shape[2], 2, rank)
        with pytest.raises(AssertionError):
            KINDS["ring"](*(t[:, :, rows] for t in inputs), make_axis(rank, 2), Mask(None, documents[:, rows]))
        return True

    assert run_local(rank_function, 2) == [True, True]


# --- negative controls: each breaks one thing


@pytest.mark.parametrize("degree", [2, 4])
def test_sees_lost_gradients_of_travelling_keys(degree: int) -> None:
    """Without the last shift, what other ranks know of dK and dV never comes home; the rest must still be right."""

    def rank_function(rank: int) -> list[float]:
        calls = 0

        def losing(received: tuple[Tensor, ...], sent: tuple[Tensor, ...], axis: Axis) -> Pending:
            nonlocal calls
            calls += 1
            pending = shift(received, sent, axis)
            if calls == 3 * (degree - 1):  # forward's, backward's of K and V, and of their gradients
                pending.wait()
                for tensor in received:
                    tensor.zero_()
            return pending

        vars(context_attention)["shift"] = losing
        worst = differences("ring", Case(), rank, degree)
        assert calls == 3 * (degree - 1)
        return worst

    for out, grad_query, grad_key, grad_value in run_local(rank_function, degree):
        assert max(out, grad_query) < TOLERANCE
        assert min(grad_key, grad_value) > 1e-2


@every_kind
def test_sees_rows_at_other_positions(kind: str) -> None:
    """Ranks that hold contiguous rows, where the kernels take them for zig-zag ones."""

    def rank_function(rank: int) -> list[float]:
        case = Case()
        local_sequence = 2 * case.chunk
        rows = torch.arange(rank * local_sequence, (rank + 1) * local_sequence)
        return differences(kind, case, rank, 2, rows)

    assert max(max(worst) for worst in run_local(rank_function, 2)) > 1e-2


@every_kind
@pytest.mark.parametrize("lost", ["window", "documents"])
def test_sees_a_lost_mask(kind: str, lost: str) -> None:
    """The reference has the mask, the kernels do not get it."""

    def rank_function(rank: int) -> float:
        case, axis = Case(window=5, documents=True), make_axis(rank, 2)
        inputs, documents, grad_out = random_inputs(case, 2)
        expected, *_ = reference(inputs, grad_out, case, documents)
        rows = zigzag(grad_out.shape[2], 2, rank)
        kept = Mask(None, documents) if lost == "window" else Mask(case.window)
        found = KINDS[kind](*(tensor[:, :, rows] for tensor in inputs), axis, kept)
        return (found - expected[:, :, rows]).abs().max().item()

    assert max(run_local(rank_function, 2)) > 1e-2


# --- traffic


def predicted(kind: str, case: Case, degree: int, itemsize: int) -> tuple[Calls, Calls]:
    if kind == "ring":
        return ring_traffic(BATCH, case.kv_heads, 2 * case.chunk, HEAD_DIM, itemsize, degree)
    return all_to_all_traffic(BATCH, case.heads, case.kv_heads, 2 * case.chunk, HEAD_DIM, itemsize, degree)


@every_kind
@pytest.mark.parametrize("degree", [1, 2, 4])
def test_traffic_is_predicted_to_the_byte(kind: str, degree: int) -> None:
    cases = [Case(), Case(kv_heads=1), Case(kv_heads=2, documents=True), Case(chunk=1, window=2)]

    def rank_function(rank: int) -> list[Any]:
        counted = []
        for case in cases:
            for dtype in (torch.float64, torch.float32, torch.bfloat16):
                axis = make_axis(rank, degree)
                inputs, documents, grad_out = random_inputs(case, degree)
                rows = zigzag(grad_out.shape[2], degree, rank)
                own = [tensor[:, :, rows].to(dtype).requires_grad_() for tensor in inputs]
                out = KINDS[kind](*own, axis, Mask(case.window, documents))
                forward = entries(axis)
                axis.ledger.clear()
                out.sum().backward()
                counted.append([forward, entries(axis)])
        return counted

    expected = [
        [tally_of(calls) for calls in predicted(kind, case, degree, itemsize)]
        for case in cases
        for itemsize in (8, 4, 2)
    ]
    assert run_local(rank_function, degree) == [expected] * degree


def entries(axis: Axis) -> list[Any]:
    return [[*key, value.calls, value.num_bytes] for key, value in axis.ledger]


def tally_of(calls: Calls) -> list[Any]:
    total = tally([(("context", operation), num_bytes) for operation, num_bytes in calls])
    return [[*key, value.calls, value.num_bytes] for key, value in total.items()]


def test_traffic_in_numbers() -> None:
    """The formulas, worked by hand for 2 * 3 * 8 * 5 = 240 elements of K, and 2 * 6 * 8 * 5 = 480 of the queries."""
    forward, backward = ring_traffic(2, 3, 8, 5, itemsize=2, degree=4)
    assert forward == [("send", 480)] * 6
    assert backward == [("send", 480)] * 6 + [("send", 960)] * 6
    forward, backward = all_to_all_traffic(2, 6, 3, 8, 5, itemsize=2, degree=6)
    assert forward == [("all_to_all", 2 * (480 + 2 * 2 * 240)), ("all_to_all", 2 * 480)]
    assert backward == forward[::-1]


# --- memory


class Largest(TorchDispatchMode):
    """Records the most elements that any tensor has that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.numel: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_no_matrix_of_scores_is_larger_than_a_tile() -> None:
    """512 rows on each of 2 ranks in tiles of 64 by 64, with and without a mask that torch's kernels do not know."""
    heads, local_sequence, tile = 2, 512, 64

    def rank_function(rank: int) -> list[int]:
        return [
            *(largest_numel(kind, rank, tile, window) for kind in KINDS for window in (None, 700)),
            largest_numel("ring", rank, local_sequence // 2, 700),  # the control: with larger tiles, larger matrices
        ]

    def largest_numel(kind: str, rank: int, tile: int, window: int | None) -> int:
        block_attention.TILE = tile
        own = [torch.randn(1, heads, local_sequence, HEAD_DIM, requires_grad=True) for _ in range(3)]
        in_forward, in_backward = Largest(), Largest()
        with in_forward:
            loss = KINDS[kind](*own, make_axis(rank, 2), Mask(window)).sum()
        with in_backward:
            loss.backward()
        if tile > 64:
            return min(in_forward.numel, in_backward.numel)
        return max(in_forward.numel, in_backward.numel)

    inputs_numel = 3 * heads * local_sequence * HEAD_DIM  # what all-to-all sends in one
    for *tiled, control in run_local(rank_function, 2):
        assert max(tiled) <= max(heads * tile**2, inputs_numel) < heads * (local_sequence // 2) ** 2 == control


@pytest.mark.soak
@pytest.mark.parametrize("fused", [True, False])
def test_131072_tokens_on_four_ranks(fused: bool) -> None:
    """A long context, forward and backward, where one matrix of a rank's scores would take 4 GiB."""

    def rank_function(rank: int) -> int:
        if not fused:
            block_attention._can_fuse = lambda *_: False
        own = [torch.randn(1, 1, 32_768, 16, requires_grad=True) for _ in range(3)]
        largest = Largest()
        with largest:
            KINDS["ring"](*own, make_axis(rank, 4)).sum().backward()
        # softmax weights sum to 1: the values' gradients over all ranks sum to the number of queries
        total = own[2].grad.sum().double()  # type: ignore[union-attr]
        dist.all_reduce(total)
        assert_close(total.item(), 131_072.0 * 16, rtol=1e-4, atol=0)
        return largest.numel

    assert max(run_local(rank_function, 4, timeout_seconds=400)) <= 1024 * 1024


# --- pure parts


@given(st.integers(1, 6), st.integers(1, 5))
def test_zigzag_shares_out_every_position_once(degree: int, chunk: int) -> None:
    sequence = 2 * degree * chunk
    shares = [zigzag(sequence, degree, index) for index in range(degree)]
    assert sorted(torch.cat(shares).tolist()) == list(range(sequence))
    for share in shares:
        assert share.tolist() == sorted(share.tolist())
        assert len(share) == 2 * chunk
        # equal work: what a rank's queries see, themselves included, is the same up to the diagonal
        assert (share + 1).sum() == chunk * (sequence + 1)


def test_zigzag_in_numbers() -> None:
    assert zigzag(12, 2, 0).tolist() == [0, 1, 2, 9, 10, 11]
    assert zigzag(12, 2, 1).tolist() == [3, 4, 5, 6, 7, 8]
    with pytest.raises(AssertionError):
        zigzag(10, 2, 0)


@given(st.integers(1, 6), st.integers(1, 3))
def test_blocks_hold_what_is_visible_and_half_of_everything(degree: int, chunk: int) -> None:
    local_sequence = 2 * chunk
    for own in range(degree):
        for peer in range(degree):
            block = visible_block(local_sequence, degree, own, peer)
            query_positions = zigzag(degree * local_sequence, degree, own)
            key_positions = zigzag(degree * local_sequence, degree, peer)
            seen = query_positions[:, None] >= key_positions
            inside = torch.zeros_like(seen)
            inside[block.queries, block.keys] = True
            assert block.is_causal == (own == peer)
            assert not (seen & ~inside).any()
            if own != peer:
                assert torch.equal(seen, inside)
                assert 2 * inside.sum() == local_sequence**2


@given(st.integers(0, 9), st.integers(0, 9), st.integers(1, 4), st.integers(1, 4), st.none() | st.integers(1, 12))
def test_mask_hides_by_position(query: int, key: int, num_rows: int, num_keys: int, window: int | None) -> None:
    mask, rows, keys = Mask(window, None), Rows(0, num_rows, query), Rows(0, num_keys, key)
    seen = torch.tensor(
        [
            [s <= t and (window is None or t - s < window) for s in range(key, key + num_keys)]
            for t in range(query, query + num_rows)
        ]
    )
    hidden = mask.hidden(rows, keys, torch.device("cpu"))
    assert torch.equal(torch.ones_like(seen) if hidden is None else ~hidden, seen)
    assert (hidden is None) == bool(seen.all())
    assert mask.sees(rows, keys) == bool(seen.any())


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("peer", [0, 1, 2])
def test_torch_kernels_and_tiles_agree(device: str, kv_heads: int, peer: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One block by torch's kernels and by tiles, as rank 1 of 3 meets it: an earlier, its own and a later one."""
    dtype = torch.float64 if device == "cpu" else torch.bfloat16
    tolerance = TOLERANCE if device == "cpu" else 0.03
    torch.manual_seed(0)
    query, key, value, grad_out = (
        torch.randn(2, count, 64, 16, dtype=dtype, device=device) for count in (4, kv_heads, kv_heads, 4)
    )
    block, mask = visible_block(64, 3, 1, peer), Mask(None, None)

    def run() -> list[Tensor]:
        softmax = block_attention.PartialSoftmax(query)
        block_attention.attend(softmax, query, key, value, block, mask, 0.3)
        rows = block.queries
        out, logsumexp = softmax.finish()
        out, logsumexp = out.nan_to_num(), logsumexp.nan_to_num()  # rows that this block leaves empty
        sums = [torch.zeros_like(t, dtype=block_attention.wide_dtype(dtype)) for t in (query, key, value)]
        result = block_attention.AttentionResult(query, out.to(dtype), grad_out, logsumexp)
        block_attention.attend_backward(block_attention.GradientSums(*sums), result, key, value, block, mask, 0.3)
        return [out[:, :, rows], logsumexp[:, :, rows], *sums]

    assert block_attention._can_fuse(query, key, value, mask)
    fused = run()
    monkeypatch.setattr(block_attention, "_can_fuse", lambda *_: False)
    monkeypatch.setattr(block_attention, "TILE", 24)
    for found, expected in zip(fused, run(), strict=True):
        assert_close(found, expected, rtol=tolerance, atol=tolerance)
    assert fused[2].abs().max() > 0.01
