"""`weft calibrate` and `weft index`: write the files for `weft serve --cache loki=FILE` and `--head graph=FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:  # these import torch
    from torch import Tensor, nn

    from weft.data.tokenizer import Tokenizer

from weft.commands.arguments import DeviceOption, Json, Source, TokenizerOption, chosen_device
from weft.commands.output import progress_on_stderr, refuse_place


def calibrate_command(
    source: Source,
    data: Annotated[Path, typer.Option(help="a file of text, of which up to 128 rows of 512 tokens are used")],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("loki.safetensors"),
    dims: Annotated[float, typer.Option(help="share of a key's dims that scores tokens")] = 0.25,
    tokens: Annotated[float, typer.Option(help="share of the tokens that a decode attends to")] = 0.25,
    newest: Annotated[int, typer.Option(help="tokens at the end that are always attended to", min=1)] = 64,
    dense_below: Annotated[int, typer.Option(help="decodes of fewer tokens attend to all", min=1)] = 1024,
    tokenizer: TokenizerOption = None,
    device: DeviceOption = "auto",
    as_json: Json = False,
) -> None:
    """Find the axes of keys for a cache that chooses tokens (Loki). On a text, with a model."""
    refuse_place(out)
    kind = chosen_device(device)
    from weft.serve.attention.choice import LokiChoice
    from weft.serve.attention.formats import save_loki
    from weft.serve.calibration.loki_calibration import calibrate

    choice = LokiChoice(dims, tokens, newest, dense_below)
    model, _, texts = _model_and_texts(source, data, tokenizer, kind)
    loki, explained, is_before = calibrate(model, texts, choice, progress_on_stderr)
    save_loki(out, loki)
    number = choice.num_dims(loki.axes.shape[-1])
    shares = explained[..., number - 1].mean(-1).tolist()
    if as_json:
        before = is_before.sum(-1).tolist()
        print(json.dumps({"file": str(out), "dims": number, "explained": shares, "heads_before_rotation": before}))
        return
    layers = ", ".join(f"{share:.3f}" for share in shares)
    print(f"wrote {out}: the first {number} of {loki.axes.shape[-1]} dims explain {layers} of the keys of the layers")
    if bool(is_before.any()):
        print(
            f"axes of keys before rotation by position explained more of rows that were held out, and are taken, for "
            f"{int(is_before.sum())} of {is_before.numel()} key heads"
        )
    print(f"use it: weft serve {source} --cache loki={out}")


def index_command(
    source: Source,
    data: Annotated[Path, typer.Option(help="a file of text, on whose tokens the search must find the likeliest")],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("graph.safetensors"),
    number: Annotated[int, typer.Option(help="of the likeliest tokens that a search gives", min=1)] = 64,
    degree: Annotated[int, typer.Option(help="edges of a token in the graph", min=2)] = 32,
    rows: Annotated[int, typer.Option(help="tokens of the text that are searched for", min=1)] = 1000,
    tokenizer: TokenizerOption = None,
    as_json: Json = False,
) -> None:
    """Build a graph that finds the likeliest tokens on a CPU. Over a model's output matrix (FGD)."""
    refuse_place(out)
    from weft.serve.calibration.graph_index import index_model

    model, tokens, texts = _model_and_texts(source, data, tokenizer, "cpu")
    about = index_model(model, tokens.vocab_size, texts, out, number, degree, rows, progress_on_stderr)
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


def _model_and_texts(
    source: Path, data: Path, tokenizer: str | None, device: str
) -> tuple[nn.Module, Tokenizer, list[Tensor]]:
    """Load a model and its tokenizer, and read rows of tokens from a text file."""
    from weft.serve.loading import calibration_texts, load_for_generation, model_vocab_size

    model, tokens, context = load_for_generation(source, tokenizer, device, lambda text: print(text, file=sys.stderr))
    return model, tokens, calibration_texts(data, tokens, context, model_vocab_size(model))
