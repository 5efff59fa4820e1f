"""The head of a served model by graph search (`vocabulary_graph.py`): logits of the likeliest tokens alone, on a CPU.

The other tokens have logits of minus infinity. What needs no more than the likeliest tokens is as with the dense head
if the search finds them: the likeliest token, and draws among the `top_k` likeliest. Everything else is refused; draws
among all tokens can be allowed, and are then among those that were found. Steps of many tokens use the dense head,
which reads its matrix once for all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from weft.errors import ConfigError, NumbersError
from weft.serve.head.vocabulary_graph import BestTokens, VocabularyGraph, search
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.weights.weight_formats import HEAD_FORMATS

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
        """Logits [rows, tokens] of hidden states [rows, hidden]: minus infinity where a token was not found."""
        weight, bias = head.weight[: self.num_tokens], None if head.bias is None else head.bias[: self.num_tokens]
        if not self.pays_for(len(hidden)):
            return F.linear(hidden, weight, bias)
        logits = torch.full((len(hidden), self.num_tokens), -torch.inf, dtype=torch.float32)
        for row, state in zip(logits, hidden, strict=True):
            found = self.best(state, weight, bias)
            row[found.tokens] = found.logits
        return logits

    def best(self, state: Tensor, weight: Tensor, bias: Tensor | None) -> BestTokens:
        """The tokens with the highest logits after one hidden state."""

        def logits_of(tokens: Tensor) -> Tensor:
            products = torch.mv(weight.index_select(0, tokens), state)
            products = products if bias is None else products + bias[tokens]
            return products if products.dtype == torch.float64 else products.float()

        return search(self.graph, logits_of, self.number, self.beam)


def output_matrix(model: nn.Module, num_tokens: int) -> tuple[Tensor, Tensor | None]:
    """The rows of a model's head for its first tokens, and their biases."""
    head = model.lm_head
    assert isinstance(head, nn.Linear)
    return head.weight.detach()[:num_tokens], None if head.bias is None else head.bias.detach()[:num_tokens]


def output_identity(model: nn.Module, num_tokens: int) -> str:
    """A hash of the output matrix and its biases."""
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
    """The head with the least beam, of doubled ones, whose likeliest tokens after hidden states [rows, hidden] are the
    dense head's in 99.9 % of the rows. Also (beam, agreement, mean number of logits) of each beam that was tried.
    `progress` is told how many rows a beam has searched for, and of how many.
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
    """What --head names: graph=FILE or approximate-graph=FILE. None for formats of weights. Raises ConfigError."""
    if name is None or name in HEAD_FORMATS:
        return None
    kind, _, path = name.partition("=")
    if kind not in ("graph", "approximate-graph") or not path:
        raise ConfigError(
            f"--head {name} is unknown; give graph=FILE or approximate-graph=FILE with one of weft index, or a format "
            f"of its weight: {', '.join(HEAD_FORMATS)}"
        )
    return replace(load(Path(path)), is_approximate=kind == "approximate-graph")
