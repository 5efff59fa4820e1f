"""Builds the graph of a model's head (`serve/head/graph_head.py`), chooses its beam on a text, and measures what it
gives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.serve.calibration.bars import Bar, Progress, no_bar
from weft.serve.head.graph_head import GraphHead, build_graph, output_identity, output_matrix, save, with_chosen_beam
from weft.serve.model.model_part import ModelPart
from weft.serve.model.step_inputs import text_inputs
from weft.serve.spec import EngineOptions

NUM_TIMED = 20
NUM_LIKELY = 10  # of the likeliest tokens after each place of the text, among which a search begins


@torch.inference_mode()
def index_model(
    model: nn.Module,
    vocab_size: int,
    texts: Sequence[Tensor],
    out: Path,
    number: int,
    degree: int,
    most_rows: int,
    bar: Bar = no_bar,
) -> dict[str, Any]:
    """Write the file of a model's graph. Returns what was found: beam, agreement, logits and milliseconds a search.
    `texts` are rows of tokens, which may be longer than the positions that the model states.
    """
    part = ModelPart(model, EngineOptions.of_texts(max((text.shape[1] for text in texts), default=1)))
    num_tokens = min(vocab_size, part.paged.vocab_size)
    weight, bias = output_matrix(model, num_tokens)
    with bar("computing the text") as progress:
        states = hidden_states(part, texts, most_rows, progress)
    likely = [F.linear(some, weight, bias).topk(min(NUM_LIKELY, num_tokens)).indices for some in states.split(256)]
    with bar("building the graph") as progress:
        graph = build_graph(weight, bias, degree, torch.cat(likely), progress)
    empty = GraphHead(graph, output_identity(model, num_tokens), min(number, num_tokens))
    with bar("choosing the beam") as progress:
        head, tried = with_chosen_beam(empty, weight, bias, states, progress)
    save(out, head)
    some = [state[None] for state in states[:NUM_TIMED]]
    return {
        "tokens": num_tokens,
        "beam": head.beam,
        "agreement": tried[-1][1],
        "scored": head.num_scored,
        "search_ms": 1e3 * _median_seconds(lambda state: head.best(state[0], weight, bias), some),
        "dense_ms": 1e3 * _median_seconds(lambda state: F.linear(state, weight, bias).topk(head.number), some),
    }


def hidden_states(part: ModelPart, texts: Sequence[Tensor], most: int, progress: Progress) -> Tensor:
    """Return at most `most` of the hidden states [rows, hidden] of texts, evenly spread."""
    rows, found = list[list[int]](), []
    for text in texts:
        rows += text.tolist()
        if sum(map(len, rows)) >= 4 * most:
            break
    for row in rows:
        states = part.hidden_states(text_inputs(row, part.layout.block_size))
        assert states is not None
        found.append(states)
        progress(len(found), len(rows))
    states = torch.cat(found)
    return states[:: max(1, len(states) // most)][:most]


def _median_seconds(call: Callable[[Tensor], Any], states: Sequence[Tensor]) -> float:
    seconds = []
    for state in states:
        begin = time.perf_counter()
        call(state)
        seconds.append(time.perf_counter() - begin)
    return sorted(seconds)[len(seconds) // 2]
