"""The order of samples: the sequences of a step follow from (seed, step), whatever the layout.

Every epoch visits each of n sequences once, in its own order. The order is a bijection that is computed, not stored: a
Feistel network over the smallest power of four that is at least n, applied until the result is below n (Black and
Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). So a resumed run continues at any step, a run on other devices
gets the same batches, and 10^12 sequences need no more memory than one batch.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Words = NDArray[np.uint64]

# Four rounds give a random-looking permutation of a large range; ranges of a few sequences need more (measured).
NUM_ROUNDS = 12
GOLDEN = 0x9E3779B97F4A7C15  # the odd number nearest 2^64 / golden ratio: the step of SplitMix64
WORD_MASK = (1 << 64) - 1


def permute(index: NDArray[np.integer[Any]], n: int, seed: int, epoch: int | Indices) -> Indices:
    """Apply a bijection on range(n), which depends on (seed, epoch), to each index. `epoch` may differ per index."""
    index = np.asarray(index)
    assert n >= 1, n
    assert index.ndim == 1, index.shape
    assert index.size == 0 or (index.min() >= 0 and index.max() < n), "index outside range(n)"
    half_bits = max(1, ((n - 1).bit_length() + 1) // 2)
    start = np.full(index.shape, seed & WORD_MASK, dtype=np.uint64)
    keys = mix(mix(start) + np.asarray(epoch, dtype=np.uint64))

    result = _feistel(index.astype(np.uint64), keys, half_bits)
    while (outside := result >= np.uint64(n)).any():  # at most 3 in 4 are outside, so there are few iterations
        result[outside] = _feistel(result[outside], keys[outside], half_bits)
    return result.astype(np.int64)


def _feistel(value: Words, keys: Words, half_bits: int) -> Words:
    """Returns a permutation of range(4 ** half_bits): each round adds a hash of one half to the other, and swaps."""
    left, right = value >> np.uint64(half_bits), value & np.uint64((1 << half_bits) - 1)
    for number in range(1, NUM_ROUNDS + 1):
        hashed = mix(mix(keys + np.uint64(number * GOLDEN & WORD_MASK)) + right)
        left, right = right, left ^ (hashed >> np.uint64(64 - half_bits))
    return (left << np.uint64(half_bits)) | right


def mix(words: Words) -> Words:
    """Applies SplitMix64's output function (Steele, Lea and Flood, 2014): each input bit affects every output bit."""
    words = words + np.uint64(GOLDEN)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def coin(index: Indices, seed: int, epoch: Indices) -> Indices:
    """Returns a random 0 or 1 for each sample, which follows from (seed, epoch, index) and not from who draws it."""
    start = mix(np.full(index.shape, (seed ^ GOLDEN) & WORD_MASK, dtype=np.uint64))
    words = mix(mix(start + epoch.astype(np.uint64)) + index.astype(np.uint64))
    return (words >> np.uint64(63)).astype(np.int64)


def epochs_of(step: int, batch: int, num_sequences: int) -> Indices:
    """Returns the epoch of each sequence of one global step, [batch]."""
    return np.arange(step * batch, (step + 1) * batch, dtype=np.int64) // num_sequences


def batch_indices(step: int, batch: int, num_sequences: int, seed: int) -> Indices:
    """Returns the sequences of one global step by index, [batch]. A batch may end one epoch and begin the next."""
    assert step >= 0, step
    assert batch >= 1, batch
    positions = np.arange(step * batch, (step + 1) * batch, dtype=np.int64)
    return permute(positions % num_sequences, num_sequences, seed, positions // num_sequences)


def local_indices(indices: Indices, micro_batch: int, num_ranks: int, rank: int) -> list[Indices]:
    """Returns the micro-batches of one rank, [micro_batch] each, in the order in which it accumulates them.

    Micro-batch a of all ranks together is a contiguous part of the batch, so the batch is the same set of sequences
    for every (micro_batch, num_ranks).
    """
    assert 0 <= rank < num_ranks, (rank, num_ranks)
    assert micro_batch >= 1, micro_batch
    assert len(indices) % (micro_batch * num_ranks) == 0, (len(indices), micro_batch, num_ranks)
    return list(indices.reshape(-1, num_ranks, micro_batch)[:, rank])
