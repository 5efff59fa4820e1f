"""`weft index`: builds the graph by which `weft serve --head graph=FILE` finds the likeliest tokens."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.commands.progress_bar import progress_on_stderr
from weft.commands.result_file import refuse_place

EXAMPLE = "Example: weft index runs/quickstart --data text.txt --out graph.safetensors"


def index_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a Hugging Face folder")],
    data: Annotated[Path, typer.Option(help="a file of text, on whose tokens the search must find the likeliest")],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("graph.safetensors"),
    number: Annotated[int, typer.Option(help="of the likeliest tokens that a search gives", min=1)] = 64,
    degree: Annotated[int, typer.Option(help="edges of a token in the graph", min=2)] = 32,
    rows: Annotated[int, typer.Option(help="tokens of the text that are searched for", min=1)] = 1000,
    tokenizer: Annotated[str | None, typer.Option(help="bytes or a tokenizer.json, for HF folders without one")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Build a graph that finds the likeliest tokens on a CPU. Over a model's output matrix (FGD)."""
    refuse_place(out)
    from weft.serve.calibration.graph_index import index_model
    from weft.serve.loading import calibration_texts, load_for_generation, model_vocab_size

    model, own, context = load_for_generation(source, tokenizer, "cpu", lambda text: print(text, file=sys.stderr))
    texts = calibration_texts(data, own, context, model_vocab_size(model))
    about = index_model(model, own.vocab_size, texts, out, number, degree, rows, progress_on_stderr)
    if as_json:
        print(json.dumps({"file": str(out), **about}))
        return
    print(
        f"wrote {out}: a beam of {about['beam']} finds the likeliest of {about['tokens']:,} tokens in "
        f"{about['agreement']:.1%} of the rows, by {about['scored']:,.0f} logits"
    )
    print(f"a search took {about['search_ms']:.2f} ms here, all logits {about['dense_ms']:.2f} ms")
    if about["search_ms"] < about["dense_ms"]:
        print(f"use it: weft serve {source} --device cpu --head graph={out}")
    else:
        print("it does not pay for this model on this machine: serve without --head")
