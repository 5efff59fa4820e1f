"""`weft generate`: continues a prompt with a trained model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.commands import PROMPT
from weft.commands.device_option import DeviceOption, chosen_device
from weft.commands.model_text import print_text
from weft.commands.serve import (
    HeadOption,
    KeysValuesOption,
    PrecisionOption,
    ResidentOption,
    SpeculateOption,
    StreamOption,
    WeightsOption,
)

EXAMPLE = 'Example: weft generate runs/quickstart --prompt "def main():" --tokens 100'


def generate_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a Hugging Face folder")],
    prompt: Annotated[str, typer.Option(help="the text to continue")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="how many tokens at most", min=1, max=100_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", min=0.0, max=10.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="choose among the k likeliest", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    tokenizer: Annotated[str | None, typer.Option(help="bytes or a tokenizer.json, for HF folders without one")] = None,
    device: DeviceOption = "auto",
    speculate: SpeculateOption = None,
    precision: PrecisionOption = None,
    weights: WeightsOption = None,
    cache: KeysValuesOption = None,
    head: HeadOption = None,
    stream_weights: StreamOption = 0,
    resident_blocks: ResidentOption = 0,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Continue a prompt with a trained model, on one process."""
    kind = chosen_device(device)
    from rich.console import Console

    from weft.serve.cache_formats import cache_format, why_slow
    from weft.serve.generate import generate
    from weft.serve.head.graph_head import graph_head
    from weft.serve.loading import Packing, load_draft, load_model
    from weft.serve.model.streamed_model import Streaming
    from weft.serve.weights.packed_linear import what_cpus_do

    with Console(stderr=True).status("generating"):
        streaming = Streaming.of(stream_weights, resident_blocks, None)
        packing = Packing(weights, head=head, precision=precision)
        loaded = load_model(source, tokenizer, kind, _warn, packing=packing, streaming=streaming)
        model, tokens_of = loaded.model, loaded.tokenizer
        for reason in what_cpus_do(model) if kind == "cpu" else ():
            _warn(reason)
        kept = cache_format(cache)
        for reason in why_slow(kept, kind, next(model.parameters()).dtype):
            _warn(reason)
        text = generate(
            model,
            tokens_of,
            prompt,
            num_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            context=loaded.context_length,
            speculate=load_draft(speculate, tokenizer, tokens_of, kind, packing.dtype(kind)),
            cache=kept,
            head=graph_head(head),
            stop_tokens=loaded.end_tokens,
        )
    if as_json:
        print(json.dumps({"prompt": prompt, "text": text}))
    else:
        print_text(prompt + text)


def _warn(message: str) -> None:
    print(f"weft: {message}", file=sys.stderr)
