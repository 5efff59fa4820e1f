"""Times steps of recurrent layers on a CPU: weft's fused step beside torch's nn.LSTM, LSTMCell, nn.GRU and GRUCell.

    python benchmarks/recurrent_cpu.py            a minute; writes benchmarks/results/recurrent-cpu.json
    python benchmarks/recurrent_cpu.py --tiny     small sizes, to try the benchmark itself; nothing is written

One request, float32, one thread. A step is one token through two layers, without embedding and head; a prompt is 64
tokens at once. nn.LSTM is called as a decoder must call it, with one token and the state before. Milliseconds are those
of a core, the median of all calls; ways take turns, so that what else the machine does meets all of them. The floor is
the bytes of the weights at the best rate of a matrix-vector product of the same size.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import harness
import torch
from torch import nn

from weft.architectures.language import RecurrentConfig
from weft.models.recurrent import RecurrentModel
from weft.serve.model.recurrent import FusedGRU, FusedLSTM, RecurrentRows, State

LAYERS, PROMPT = 2, 64
Call = Callable[[], Any]


def medians(calls: dict[str, Call], number: int) -> dict[str, float]:
    """Milliseconds of each call, which take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for index in range(number + 3):
        for name, call in calls.items():
            begin = time.process_time()
            call()
            if index >= 3:
                times[name].append(time.process_time() - begin)
    return {name: 1e3 * median(found) for name, found in times.items()}


def prompt_by_weft(layers: Sequence[FusedLSTM | FusedGRU], inner: torch.Tensor, states: list[State]) -> None:
    """Compute a text, with the input products of each layer at once."""
    for layer, state in zip(layers, states, strict=True):
        found = []
        for inputs in layer.inputs(inner).split(1):
            state = layer.step_hoisted(inputs, state)
            found.append(state[0])
        inner = torch.cat(found)


def measured(kind: str, size: int, number: int) -> dict[str, Any]:
    """Steps and prompts of one size, by torch and by weft."""
    config = RecurrentConfig(kind, vocab_size=257, hidden_size=size, num_hidden_layers=LAYERS)  # type: ignore[arg-type]
    torch.manual_seed(0)
    plain = (nn.LSTM if kind == "lstm" else nn.GRU)(size, size, LAYERS, batch_first=True).eval()
    rows = RecurrentRows(RecurrentModel(config).eval())  # has a table in place of the first layer's input products
    fused = FusedLSTM if kind == "lstm" else FusedGRU
    layers = [fused(layer) for layer in RecurrentModel(config).eval().layers]  # type: ignore[arg-type]
    token, hidden = torch.randn(1, 1, size), torch.zeros(LAYERS, 1, size)
    given = (hidden, torch.zeros_like(hidden)) if kind == "lstm" else hidden
    make = nn.LSTMCell if kind == "lstm" else nn.GRUCell
    cells = [make(size, size) for _ in range(LAYERS)]
    states: list[State] = [(torch.zeros(1, size), torch.zeros(1, size))] * LAYERS

    def by_cells() -> None:
        row = token[0]
        for cell, state in zip(cells, states, strict=True):
            row = cell(row, state)[0] if kind == "lstm" else cell(row, state[0])

    def by_weft() -> None:
        row = token[0]
        for layer, state in zip(layers, states, strict=True):
            row = layer.step(row, state)[0]

    assert rows._table is not None
    product = rows._table[3:4]

    def by_weft_with_table() -> None:
        row = rows.layers[0].step_hoisted(product, states[0])[0]
        for layer, state in zip(rows.layers[1:], states[1:], strict=True):
            row = layer.step(row, state)[0]

    text = torch.randn(1, PROMPT, size)

    gates = 4 if kind == "lstm" else 3
    weight, row = torch.randn(LAYERS * gates * size, 2 * size), torch.randn(2 * size)
    steps = medians(
        {
            "torch": lambda: plain(token, given),
            "torch_cells": by_cells,
            "weft": by_weft,
            "weft_with_table": by_weft_with_table,
            "matrix_vector_product": lambda: torch.mv(weight, row),
        },
        number,
    )
    prompts = medians(
        {"torch": lambda: plain(text), "weft": lambda: prompt_by_weft(layers, text[0], states)}, max(5, number // 20)
    )
    return {
        "weight_bytes": weight.numel() * weight.itemsize,
        "step_milliseconds": steps,
        "prompt_milliseconds": prompts,
        "step_times_as_fast_as_torch": steps["torch"] / steps["weft"],
        "step_times_as_fast_as_cells": steps["torch_cells"] / steps["weft"],
        "step_share_of_floor": steps["matrix_vector_product"] / steps["weft"],
        "prompt_times_as_fast_as_torch": prompts["torch"] / prompts["weft"],
    }


@torch.inference_mode()
def main() -> None:
    parser = harness.options(__doc__, "recurrent-cpu.json", harness.NOT_WRITTEN)
    given = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, Any] = {
        "capability": torch.backends.cpu.get_cpu_capability(),
        "layers": LAYERS,
        "prompt_tokens": PROMPT,
    }
    for kind in ("lstm", "gru"):
        for size in (32,) if given.tiny else (128, 256, 512, 1024):
            one = measured(kind, size, 10 if given.tiny else 100)
            results[f"{kind} {size}"] = one
            print(kind, size, json.dumps(one), flush=True)
    if not given.tiny:
        harness.write(given.out, results, device="cpu")


if __name__ == "__main__":
    main()
