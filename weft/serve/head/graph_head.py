"""The head of a served model by graph search (FGD): logits of the likeliest tokens alone, on a CPU.

The other tokens have logits of minus infinity. What needs no more than the likeliest tokens is as with the dense head
if the search finds them: the likeliest token, and draws among the `top_k` likeliest. Everything else is refused; draws
among all tokens can be allowed, and are then among those that were found. Steps of many tokens use the dense head,
which reads its matrix once for all of them.

The graph lies over the rows of the output matrix. The logit of token i is w_i·h + b_i. With U² the largest
‖w_i‖² + b_i², the points

    x_i = [w_i, b_i, sqrt(U² - ‖w_i‖² - b_i²)]        have norm U, and for the query q = [h, 1, 0]
    ‖x_i - q‖² = U² + ‖q‖² - 2·(w_i·h + b_i),

so the nearest point has the highest logit. Each point has edges to near ones: of its nearest points in their order,
one is kept unless a kept one is nearer to it than the point itself, so that edges go in all directions. Edges go both
ways as far as there is room, and every point can be reached from the entries. A search (`search`) goes along edges to
better points and keeps a beam of the best; with a beam of all tokens it finds what the dense product finds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import numpy as np
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.weights.weight_formats import HEAD_FORMATS

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
    """Return the points [tokens, hidden + 2] of an output matrix, in float64, all of the same norm."""
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
    """Return the graph of an output matrix [tokens, hidden]. Takes tokens² products of rows, in float32. `progress` is
    told how many tokens have edges, and of how many.

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
    """Return edges [points, most] of some points: near ones in all directions; the point itself where there are
    fewer.
    """
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
    """Return edges [points, degree] with the reverse of each edge, as far as there is room."""
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
    """Return edges with one more column if some points could not be reached: each of these from its nearest reachable
    one that has no such edge yet.
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
    """Return which points [points] can be reached from the entries."""
    is_reached = torch.zeros(len(edges), dtype=torch.bool)
    frontier = entries
    while len(frontier):
        is_reached[frontier] = True
        following = edges[frontier].unique()
        frontier = following[~is_reached[following]]
    return is_reached


def search(graph: VocabularyGraph, logits_of: Callable[[Tensor], Tensor], number: int, beam: int) -> BestTokens:
    """Return the `number` tokens with the highest logits, by a beam of at least so many tokens. `logits_of` computes
    those of tokens. The edges of some of the best tokens are followed together, so that there are few steps in Python.
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


KIND = "weft vocabulary graph 1"
GATHERED_PASSES = 3  # a row that is found is read, written next to others, and read again
AGREEMENT = 0.999  # of the likeliest tokens with those of the dense head, by which the beam is chosen


@dataclass(frozen=True)
class GraphHead:
    """Finds the `number` likeliest of the first tokens of a model, by a beam of `beam` tokens.

    `num_scored` is the mean number of logits that a search computed on the text by which the beam was chosen;
    `num_rounds` and `num_edges` are the means of its rounds and of the edges that it followed, 0 in older files.
    """

    graph: VocabularyGraph
    identity: str  # of the output matrix
    number: int = 64
    beam: int = 64
    num_scored: float = 0.0
    num_rounds: float = 0.0
    num_edges: float = 0.0
    is_approximate: bool = False  # draws among all tokens are allowed

    @property
    def num_tokens(self) -> int:
        return len(self.graph.edges)

    def refuse(self, model: nn.Module, device: torch.device) -> None:
        """Raise ConfigError if it was made for another model, or does not pay on the device."""
        if device.type != "cpu":
            raise ConfigError("--head graph is for CPUs: a GPU reads the whole output matrix faster; leave it out")
        if output_identity(model, self.num_tokens) != self.identity:
            raise ConfigError(
                "the graph of --head is of another output matrix; run weft index on the served model, and serve it "
                "without --precision, which rounds the matrix"
            )

    def refuse_request(self, request: Request) -> None:
        """Raise RequestError for a request that needs the logits of more tokens."""
        sampling, plain = request.sampling, Sampling()
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "num_logprobs", "logit_bias")
        changed = [name for name in names if getattr(sampling, name) != getattr(plain, name)]
        if request.answer_form is not None:
            changed.append("a schema")
        if changed:
            raise RequestError("invalid", f"{changed[0]} needs the logits of all tokens, which --head graph leaves out")
        is_among_found = sampling.temperature == 0 or 1 <= sampling.top_k <= self.number
        if not (is_among_found or self.is_approximate):
            raise RequestError(
                "invalid",
                f"a draw among all tokens needs all logits, and --head graph finds the {self.number} highest; give "
                f"temperature 0 or a top_k from 1 to {self.number}, or serve with --head approximate-graph=FILE",
            )

    def pays_for(self, num_rows: int) -> bool:
        """Does a search for each row read fewer bytes than the dense product?"""
        return num_rows * self.num_scored * GATHERED_PASSES < self.num_tokens

    def logits(self, hidden: Tensor, head: nn.Linear) -> Tensor:
        """Return logits [rows, tokens] of hidden states [rows, hidden]: minus infinity where a token was not found."""
        weight, bias = head.weight[: self.num_tokens], None if head.bias is None else head.bias[: self.num_tokens]
        if not self.pays_for(len(hidden)):
            return F.linear(hidden, weight, bias)
        logits = torch.full((len(hidden), self.num_tokens), -torch.inf, dtype=torch.float32)
        for row, state in zip(logits, hidden, strict=True):
            found = self.best(state, weight, bias)
            row[found.tokens] = found.logits
        return logits

    def best(self, state: Tensor, weight: Tensor, bias: Tensor | None) -> BestTokens:
        """Return the tokens with the highest logits after one hidden state."""

        def logits_of(tokens: Tensor) -> Tensor:
            products = torch.mv(weight.index_select(0, tokens), state)
            products = products if bias is None else products + bias[tokens]
            return products if products.dtype == torch.float64 else products.float()

        return search(self.graph, logits_of, self.number, self.beam)


def output_matrix(model: nn.Module, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """Return the rows of a model's head for its first tokens, and their biases."""
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    return head.weight.detach()[:num_tokens], None if head.bias is None else head.bias.detach()[:num_tokens]


def output_identity(model: nn.Module, num_tokens: int) -> str:
    """Return a hash of the output matrix and its biases."""
    found = hashlib.sha256()
    for one in output_matrix(model, num_tokens):
        if one is not None:
            found.update(str(tuple(one.shape)).encode() + one.cpu().float().contiguous().numpy().tobytes())
    return found.hexdigest()


def with_chosen_beam(
    head: GraphHead,
    weight: Tensor,
    bias: Tensor | None,
    states: Tensor,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> tuple[GraphHead, list[tuple[int, float, float]]]:
    """Return the head with the least beam, of doubled ones, whose likeliest tokens after hidden states [rows, hidden]
    are the dense head's in 99.9 % of the rows. Also (beam, agreement, mean number of logits) of each beam that was
    tried. `progress` is told how many rows a beam has searched for, and of how many.
    """
    if not bool(states.isfinite().all()):
        raise NumbersError("hidden states of the text are NaN or infinite; the model's weights are damaged")
    dense = torch.cat([F.linear(some, weight, bias).argmax(1) for some in states.split(256)])
    tried = list[tuple[int, float, float]]()
    beam = head.number
    while True:
        head = replace(head, beam=beam)
        results = list[BestTokens]()
        for state in states:
            results.append(head.best(state, weight, bias))
            progress(len(results), len(states))
        equal = sum(int(found.tokens[0]) == int(one) for found, one in zip(results, dense, strict=True))
        scored = fmean(found.num_scored for found in results)
        tried.append((beam, equal / len(results), scored))
        if tried[-1][1] >= AGREEMENT or beam >= head.num_tokens:
            rounds, edges = (fmean(getattr(one, name) for one in results) for name in ("num_rounds", "num_edges"))
            return replace(head, num_scored=scored, num_rounds=rounds, num_edges=edges), tried
        beam = min(2 * beam, head.num_tokens)


def save(path: Path, head: GraphHead) -> None:
    """Write a file that `load` reads."""
    about = {"kind": KIND, "output": head.identity, "scored": str(head.num_scored)}
    about |= {"number": str(head.number), "beam": str(head.beam)}
    about |= {"rounds": str(head.num_rounds), "edges": str(head.num_edges)}
    tensors = {"edges": head.graph.edges.to(torch.int32), "entries": head.graph.entries.to(torch.int32)}
    try:
        save_file({name: one.contiguous() for name, one in tensors.items()}, str(path), about)
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"cannot write {path} ({error}); choose another place by --out") from None


def load(path: Path) -> GraphHead:
    """Read the file that `weft index` wrote. Raises ConfigError."""
    try:
        with safe_open(str(path), "pt") as file:
            about = file.metadata() or {}
            edges, entries = (file.get_tensor(name).long() for name in ("edges", "entries"))
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"--head graph={path} cannot be read ({error}); run weft index") from None
    is_graph = about.get("kind") == KIND and edges.dim() == 2 and entries.dim() == 1 and edges.numel() and len(entries)
    has_fields = {"output", "number", "beam", "scored"} <= about.keys()
    if not (is_graph and has_fields) or any(
        int(one.min()) < 0 or int(one.max()) >= len(edges) for one in (edges, entries)
    ):
        raise ConfigError(f"--head graph={path} is no file of weft index, or damaged; run weft index")
    try:
        numbers = (int(about["number"]), int(about["beam"]), float(about["scored"]))
        means = (float(about.get("rounds", 0)), float(about.get("edges", 0)))
    except ValueError as error:
        raise ConfigError(f"--head graph={path} is damaged ({error}); run weft index") from None
    return GraphHead(VocabularyGraph(edges, entries), about["output"], *numbers, *means)


def graph_head(name: str | None) -> GraphHead | None:
    """Return the head that --head names: graph=FILE or approximate-graph=FILE. None for formats of weights. Raises
    ConfigError.
    """
    if name is None or name in HEAD_FORMATS:
        return None
    kind, _, path = name.partition("=")
    if kind not in ("graph", "approximate-graph") or not path:
        raise ConfigError(
            f"--head {name} is unknown; give graph=FILE or approximate-graph=FILE with one of weft index, or a format "
            f"of its weight: {', '.join(HEAD_FORMATS)}"
        )
    return replace(load(Path(path)), is_approximate=kind == "approximate-graph")
