"""A graph over the rows of an output matrix, in which the tokens with the highest logits are found (FGD).

The logit of token i is w_i·h + b_i. With U² the largest ‖w_i‖² + b_i², the points

    x_i = [w_i, b_i, sqrt(U² - ‖w_i‖² - b_i²)]        have norm U, and for the query q = [h, 1, 0]
    ‖x_i - q‖² = U² + ‖q‖² - 2·(w_i·h + b_i),

so the nearest point has the highest logit. Each point has edges to near ones: of its nearest points in their order,
one is kept unless a kept one is nearer to it than the point itself, so that edges go in all directions. Edges go both
ways as far as there is room, and every point can be reached from the entries. A search (`search`) goes along edges to
better points and keeps a beam of the best; with a beam of all tokens it finds what the dense product finds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 512  # points whose nearest are found at once
NUM_ENTRIES = 64
LEAST_AT_ONCE = 16  # tokens whose edges are followed together


@dataclass(frozen=True)
class VocabularyGraph:
    """Edges [tokens, degree] (int64; the point itself where there are fewer), and where a search begins."""

    edges: Tensor
    entries: Tensor


@dataclass(frozen=True)
class BestTokens:
    """The best tokens of a search, best first and of equal ones the lowest; how many logits were computed, in how many
    rounds edges were followed, and how many edges.
    """

    tokens: Tensor
    logits: Tensor
    num_scored: int
    num_rounds: int
    num_edges: int


def points_of(weight: Tensor, bias: Tensor | None) -> Tensor:
    """The points [tokens, hidden + 2] of an output matrix, in float64, all of the same norm."""
    wide = weight.double()
    offset = wide.new_zeros(len(wide)) if bias is None else bias.double()
    squares = wide.square().sum(1) + offset.square()
    missing = (squares.max() - squares).clamp(min=0).sqrt()
    return torch.cat([wide, offset[:, None], missing[:, None]], dim=1)


def build_graph(
    weight: Tensor,
    bias: Tensor | None,
    degree: int = 32,
    likely: Tensor | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> VocabularyGraph:
    """The graph of an output matrix [tokens, hidden]. Takes tokens² products of rows, in float32. `progress` is told
    how many tokens have edges, and of how many.

    A search begins at the tokens that stand most often in `likely`, likely tokens of a text: one of 32 of all tokens.
    Without these, at the tokens with most edges.
    """
    points = points_of(weight, bias).float()
    number = len(points)
    degree = min(degree, number - 1)
    half = max(1, degree // 2)
    own = list[Tensor]()
    for start in range(0, number, TILE):
        own.append(_edges_of(points, start, half))
        progress(min(start + TILE, number), number)
    edges = _both_ways(torch.cat(own), degree)
    incoming = torch.bincount(edges.flatten(), minlength=number)
    entries = incoming.argsort(descending=True, stable=True)[:NUM_ENTRIES]
    if likely is not None:
        counts = torch.bincount(likely.flatten(), minlength=number)
        most = counts.argsort(descending=True, stable=True)[: max(NUM_ENTRIES, number // 32)]
        entries = most[counts[most] > 0]
    entries = entries.sort().values
    return VocabularyGraph(_reachable(edges, entries, points), entries)


def _edges_of(points: Tensor, start: int, most: int) -> Tensor:
    """Edges [points, most] of some points: near ones in all directions; the point itself where there are fewer."""
    some = points[start : start + TILE]
    rows = torch.arange(len(some))
    closeness = some @ points.T  # norms are equal: the higher, the nearer
    closeness[rows, rows + start] = -torch.inf
    near, candidates = closeness.topk(min(3 * most, len(points) - 1), dim=1)
    among = torch.bmm(points[candidates], points[candidates].mT)  # [points, candidates, candidates]
    is_kept = torch.zeros_like(candidates, dtype=torch.bool)
    for place in range(candidates.shape[1]):
        is_nearer = (among[:, place] > near[:, place : place + 1]) & is_kept
        is_kept[:, place] = ~is_nearer.any(1) & (is_kept.sum(1) < most)
    order = (~is_kept).to(torch.int8).argsort(dim=1, stable=True)[:, :most]
    kept = candidates.gather(1, order)
    return torch.where(is_kept.gather(1, order), kept, (rows + start)[:, None])


def _both_ways(own: Tensor, degree: int) -> Tensor:
    """Edges [points, degree] with the reverse of each edge, as far as there is room."""
    number, width = own.shape
    sources, targets = torch.arange(number).repeat_interleave(width), own.flatten()
    is_edge = sources != targets
    sources, targets = sources[is_edge], targets[is_edge]
    pairs = torch.cat([sources * number + targets, targets * number + sources])
    is_reverse = torch.arange(len(pairs)) >= len(sources)
    # One's own edges come before reverse ones, and of equal pairs the first is taken.
    order = pairs.argsort(stable=True)
    is_first = torch.ones(len(pairs), dtype=torch.bool)
    is_first[1:] = pairs[order][1:] != pairs[order][:-1]
    pairs, is_reverse = pairs[order][is_first], is_reverse[order][is_first]
    order = ((pairs // number) * 2 + is_reverse).argsort(stable=True)
    pairs = pairs[order]
    begins = torch.searchsorted(pairs // number, torch.arange(number))
    places = torch.arange(len(pairs)) - begins[pairs // number]
    fits = places < degree
    edges = torch.arange(number)[:, None].repeat(1, degree)
    edges[(pairs // number)[fits], places[fits]] = pairs[fits] % number
    return edges


def _reachable(edges: Tensor, entries: Tensor, points: Tensor) -> Tensor:
    """Edges with one more column if some points could not be reached: each of these from its nearest reachable one
    that has no such edge yet.
    """
    itself = torch.arange(len(edges))
    extra = itself.clone()
    while True:
        is_reached = _reached(torch.cat([edges, extra[:, None]], dim=1), entries)
        missing = (~is_reached).nonzero()[:, 0]
        if not len(missing):
            break
        is_free = is_reached & (extra == itself)
        for some in missing[: int(is_free.sum())].split(TILE):
            for one, closeness in zip(some.tolist(), points[some] @ points.T, strict=True):
                source = closeness.masked_fill_(~is_free, -torch.inf).argmax()
                extra[source], is_free[source] = one, False
    return edges if bool((extra == itself).all()) else torch.cat([edges, extra[:, None]], dim=1)


def _reached(edges: Tensor, entries: Tensor) -> Tensor:
    """Which points [points] can be reached from the entries."""
    is_reached = torch.zeros(len(edges), dtype=torch.bool)
    frontier = entries
    while len(frontier):
        is_reached[frontier] = True
        following = edges[frontier].unique()
        frontier = following[~is_reached[following]]
    return is_reached


def search(graph: VocabularyGraph, logits_of: Callable[[Tensor], Tensor], number: int, beam: int) -> BestTokens:
    """The `number` tokens with the highest logits, by a beam of at least so many tokens. `logits_of` computes those of
    tokens. The edges of some of the best tokens are followed together, so that there are few steps in Python.
    """
    beam = max(beam, number)
    at_once = max(LEAST_AT_ONCE, beam // 4)
    edges, tokens = graph.edges.numpy(), graph.entries.numpy()  # numpy's small functions start faster than torch's
    is_seen = np.zeros(len(edges), dtype=np.bool_)
    is_seen[tokens] = True
    logits = logits_of(graph.entries).numpy()
    is_open = np.ones(len(tokens), dtype=np.bool_)  # its edges have not been followed
    num_scored, num_rounds, num_edges = len(tokens), 0, 0
    while is_open.any():
        best = is_open.nonzero()[0]
        if len(best) > at_once:
            best = best[np.argpartition(-logits[best], at_once - 1)[:at_once]]
        is_open[best] = False
        following = edges[tokens[best]].ravel()
        num_rounds, num_edges = num_rounds + 1, num_edges + len(following)
        following = np.unique(following[~is_seen[following]])
        if not len(following):
            continue
        is_seen[following] = True
        num_scored += len(following)
        tokens = np.concatenate([tokens, following])
        logits = np.concatenate([logits, logits_of(torch.from_numpy(following)).numpy()])
        is_open = np.concatenate([is_open, np.ones(len(following), dtype=np.bool_)])
        if len(tokens) > beam:
            kept = np.argpartition(-logits, beam - 1)[:beam]
            tokens, logits, is_open = tokens[kept], logits[kept], is_open[kept]
    best = np.lexsort((tokens, -logits))[:number]
    return BestTokens(torch.from_numpy(tokens[best]), torch.from_numpy(logits[best]), num_scored, num_rounds, num_edges)
