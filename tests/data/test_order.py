"""The order of samples: a bijection per epoch, and the same batches whatever the layout or the step resumed at."""

import collections
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.data.order import batch_indices, coin, epochs_of, local_indices, permute

seeds = st.integers(0, 2**64 - 1)


@given(n=st.integers(1, 10_000), seed=seeds, epoch=st.integers(0, 2**40))
@settings(max_examples=60)
def test_permute_is_a_bijection(n: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, seed, epoch)), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 255, 256, 257, 4095, 4096, 4097])
def test_permute_is_a_bijection_around_powers_of_two(n: int) -> None:
    assert np.array_equal(np.sort(permute(np.arange(n), n, 0, 0)), np.arange(n))


@given(seed=seeds, start=st.integers(0, 10**9 - 2000))
@settings(max_examples=20)
def test_permute_of_a_billion_is_injective_and_stays_inside(seed: int, start: int) -> None:
    n = 10**9
    result = permute(np.arange(start, start + 2000), n, seed, 3)
    assert result.dtype == np.int64
    assert len(np.unique(result)) == 2000
    assert result.min() >= 0
    assert result.max() < n


def test_permute_of_a_billion_is_spread_evenly() -> None:
    n, count, num_bins = 10**9, 64_000, 64
    result = permute(np.arange(count), n, seed=1, epoch=0)
    observed = np.bincount(result * num_bins // n, minlength=num_bins)
    chi_square = ((observed - count / num_bins) ** 2 / (count / num_bins)).sum()
    assert 25 < chi_square < 125  # 63 degrees of freedom: mean 63, deviation 11; even spacing would be near 0
    assert abs(np.corrcoef(np.arange(count), result)[0, 1]) < 0.02
    assert abs(np.corrcoef(result[:-1], result[1:])[0, 1]) < 0.02


def test_small_ranges_take_every_order_about_equally_often() -> None:
    num_epochs, n = 6000, 4
    columns = [permute(np.full(num_epochs, index), n, 7, np.arange(num_epochs)) for index in range(n)]
    counts = collections.Counter(map(tuple, np.stack(columns, axis=1).tolist()))
    assert set(counts) == set(itertools.permutations(range(n)))
    assert min(counts.values()) > 190  # 250 expected, deviation 16
    assert max(counts.values()) < 310


def test_seeds_and_epochs_give_unrelated_orders() -> None:
    n = 10_000
    orders = [permute(np.arange(n), n, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]]
    for first, second in itertools.combinations(orders, 2):
        assert (first == second).sum() < 10  # 1 expected


def test_the_order_never_changes_between_versions() -> None:
    # A change here breaks the resumption of every run in progress.
    assert permute(np.arange(10), 10, seed=1234, epoch=0).tolist() == [3, 2, 5, 7, 6, 8, 0, 1, 4, 9]
    assert permute(np.arange(3), 10**12, seed=1234, epoch=5).tolist() == [948855780046, 617078442522, 285560317872]
    assert coin(np.arange(12), 7, np.full(12, 2)).tolist() == [1, 1, 0, 1, 1, 1, 0, 1, 0, 1, 0, 1]


def test_indices_outside_the_range_are_refused() -> None:
    for bad in (-1, 10):
        with pytest.raises(AssertionError, match="outside"):
            permute(np.array([bad]), 10, 0, 0)


@given(n=st.integers(1, 60), batch=st.integers(1, 80), seed=seeds)
def test_every_sample_once_per_epoch_also_when_batches_straddle_epochs(n: int, batch: int, seed: int) -> None:
    num_epochs = 3
    steps = -(-num_epochs * n // batch)
    stream = np.concatenate([batch_indices(step, batch, n, seed) for step in range(steps)])
    for epoch in range(num_epochs):
        assert np.array_equal(np.sort(stream[epoch * n : (epoch + 1) * n]), np.arange(n))


def test_a_straddling_batch_is_the_end_of_one_epoch_and_the_start_of_the_next() -> None:
    n, batch, seed = 10, 8, 5
    first, second = (permute(np.arange(n), n, seed, epoch) for epoch in (0, 1))
    assert batch_indices(1, batch, n, seed).tolist() == [*first[8:], *second[:6]]
    assert first.tolist() != second.tolist()


def test_a_batch_larger_than_the_data_spans_several_epochs() -> None:
    assert collections.Counter(batch_indices(0, 9, 3, seed=0).tolist()) == {0: 3, 1: 3, 2: 3}


@given(step=st.integers(0, 10**7), seed=seeds)
@settings(max_examples=30)
def test_the_stream_depends_on_the_position_and_not_on_the_batch_size(step: int, seed: int) -> None:
    n = 12_345
    halves = [batch_indices(2 * step, 8, n, seed), batch_indices(2 * step + 1, 8, n, seed)]
    assert np.array_equal(np.concatenate(halves), batch_indices(step, 16, n, seed))


def test_resuming_at_any_step_repeats_the_run() -> None:
    n, batch, seed = 37, 8, 99
    run = [batch_indices(step, batch, n, seed).tolist() for step in range(20)]
    for resumed_at in (0, 1, 7, 19):
        assert [batch_indices(step, batch, n, seed).tolist() for step in range(resumed_at, 20)] == run[resumed_at:]


@given(num_ranks=st.integers(1, 8), micro_batch=st.integers(1, 4), accumulation=st.integers(1, 4), seed=seeds)
def test_the_ranks_together_hold_the_batch(num_ranks: int, micro_batch: int, accumulation: int, seed: int) -> None:
    batch = num_ranks * micro_batch * accumulation
    indices = batch_indices(3, batch, 1000, seed)
    by_rank = [local_indices(indices, micro_batch, num_ranks, rank) for rank in range(num_ranks)]
    assert all(len(parts) == accumulation for parts in by_rank)
    in_order = [by_rank[rank][part] for part in range(accumulation) for rank in range(num_ranks)]
    assert all(part.shape == (micro_batch,) for part in in_order)
    assert np.array_equal(np.concatenate(in_order), indices)


def test_the_layout_does_not_change_the_batch() -> None:
    indices = batch_indices(11, 24, 1000, seed=4)
    for num_ranks, micro_batch in [(1, 24), (2, 3), (4, 6), (8, 1), (3, 2)]:
        parts = [part for rank in range(num_ranks) for part in local_indices(indices, micro_batch, num_ranks, rank)]
        assert sorted(np.concatenate(parts).tolist()) == sorted(indices.tolist())


def test_local_indices_of_a_known_case() -> None:
    parts = local_indices(np.arange(12), micro_batch=2, num_ranks=3, rank=1)
    assert [part.tolist() for part in parts] == [[2, 3], [8, 9]]


def test_a_batch_that_does_not_divide_is_refused() -> None:
    with pytest.raises(AssertionError, match=r"\(10, 2, 3\)"):
        local_indices(np.arange(10), micro_batch=2, num_ranks=3, rank=0)


def test_a_coin_is_fair_and_depends_on_seed_epoch_and_sample_only() -> None:
    index, none = np.arange(20_000), np.zeros(20_000, dtype=np.int64)
    bits = coin(index, 3, none)
    assert 0.48 < bits.mean() < 0.52
    assert np.array_equal(coin(index[7:9], 3, none[:2]), bits[7:9])
    for other in (coin(index, 4, none), coin(index, 3, none + 1)):
        assert 0.48 < (bits == other).mean() < 0.52


def test_the_epochs_of_a_step_are_those_of_its_sequences() -> None:
    assert epochs_of(2, 4, 9).tolist() == [0, 1, 1, 1]
