"""Measures graph searches over an output matrix (`serve/head/graph_head.py`) on this CPU, in random graphs and
matrices.

Searches in different graphs, with different beams and widths of rows, differ in their rounds, edges, logits and bytes.
Their times are fitted as a sum over these four.
"""

from __future__ import annotations

from statistics import median
from time import thread_time as clock

import numpy as np
import torch

from weft.cluster.decode_rates import SearchTimes
from weft.serve.head.graph_head import GraphHead, VocabularyGraph

NUM_TOKENS, NUM_ENTRIES, NUMBER = 1 << 14, 512, 64
# Edges of a token, and how far they lead: the nearer, the more of them lead to tokens that were met before.
GRAPHS = ((32, NUM_TOKENS // 2), (32, 16), (32, 4), (4, 64))
WIDTHS, BEAMS, NUM_SEARCHES = (64, 1024), (64, 1024), 11


def measured_search() -> SearchTimes:
    """The seconds of each part of a search."""
    generator = torch.Generator().manual_seed(0)
    entries = torch.randperm(NUM_TOKENS, generator=generator)[:NUM_ENTRIES].sort().values
    counts, seconds = list[tuple[float, ...]](), list[float]()
    for width in WIDTHS:
        weight = torch.randn(NUM_TOKENS, width, generator=generator)
        states = torch.randn(NUM_SEARCHES, width, generator=generator)
        for degree, far in GRAPHS:
            steps = torch.randint(-far, far, (NUM_TOKENS, degree), generator=generator)
            edges = (torch.arange(NUM_TOKENS)[:, None] + steps) % NUM_TOKENS
            for beam in BEAMS:
                head = GraphHead(VocabularyGraph(edges, entries), "", NUMBER, beam)
                found, times = zip(*(_search(head, weight, state) for state in states), strict=True)
                counts.append(tuple(median(column) for column in zip(*found, strict=True)))
                seconds.append(median(times))
    return SearchTimes(*_least_squares(np.array(counts), np.array(seconds)))


def _search(head: GraphHead, weight: torch.Tensor, state: torch.Tensor) -> tuple[tuple[float, ...], float]:
    begin = clock()
    found = head.best(state, weight, None)
    seconds = clock() - begin
    row_bytes = weight.shape[1] * weight.itemsize
    return (found.num_rounds, found.num_edges, found.num_scored, found.num_scored * row_bytes), seconds


def _least_squares(counts: np.ndarray, seconds: np.ndarray) -> list[float]:
    """The times, none below 0, of which sums over counts come nearest to the seconds, in relative terms.

    A part whose time would be below 0 is left out, the worst first.
    """
    scaled = counts / seconds[:, None]
    kept = list(range(counts.shape[1]))
    while True:
        times = np.linalg.lstsq(scaled[:, kept], np.ones(len(seconds)), rcond=None)[0]
        if min(times) >= 0:
            break
        kept.pop(int(np.argmin(times * counts[:, kept].mean(0))))
    found = [0.0] * counts.shape[1]
    for index, value in zip(kept, times, strict=True):
        found[index] = float(value)
    return found
