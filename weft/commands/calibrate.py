"""`weft calibrate`: finds what `weft serve --cache loki=FILE` needs to know of a model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from weft.commands.device_option import DeviceOption, chosen_device
from weft.commands.progress_bar import progress_on_stderr
from weft.commands.result_file import refuse_place

EXAMPLE = "Example: weft calibrate runs/quickstart --data text.txt --out loki.safetensors"


def calibrate_command(
    source: Annotated[Path, typer.Argument(help="a run folder, a checkpoint or a Hugging Face folder")],
    data: Annotated[Path, typer.Option(help="a file of text, of which up to 128 rows of 512 tokens are used")],
    out: Annotated[Path, typer.Option(help="the file to write")] = Path("loki.safetensors"),
    dims: Annotated[float, typer.Option(help="share of a key's dims that scores tokens")] = 0.25,
    tokens: Annotated[float, typer.Option(help="share of the tokens that a decode attends to")] = 0.25,
    newest: Annotated[int, typer.Option(help="tokens at the end that are always attended to", min=1)] = 64,
    dense_below: Annotated[int, typer.Option(help="decodes of fewer tokens attend to all", min=1)] = 1024,
    tokenizer: Annotated[str | None, typer.Option(help="bytes or a tokenizer.json, for HF folders without one")] = None,
    device: DeviceOption = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False,
) -> None:
    """Find the axes of keys for a cache that chooses tokens (Loki). On a text, with a model."""
    refuse_place(out)
    kind = chosen_device(device)
    from weft.serve.attention.choice import LokiChoice
    from weft.serve.attention.formats import save_loki
    from weft.serve.calibration.loki_calibration import calibrate
    from weft.serve.loading import calibration_texts, load_for_generation, model_vocab_size

    choice = LokiChoice(dims, tokens, newest, dense_below)
    model, tokens_of, context = load_for_generation(source, tokenizer, kind, lambda text: print(text, file=sys.stderr))
    texts = calibration_texts(data, tokens_of, context, model_vocab_size(model))
    found, explained, is_before = calibrate(model, texts, choice, progress_on_stderr)
    save_loki(out, found)
    number = choice.num_dims(found.axes.shape[-1])
    shares = explained[..., number - 1].mean(-1).tolist()
    if as_json:
        before = is_before.sum(-1).tolist()
        print(json.dumps({"file": str(out), "dims": number, "explained": shares, "heads_before_rotation": before}))
        return
    layers = ", ".join(f"{share:.3f}" for share in shares)
    print(f"wrote {out}: the first {number} of {found.axes.shape[-1]} dims explain {layers} of the keys of the layers")
    if bool(is_before.any()):
        print(
            f"axes of keys before rotation by position explained more of rows that were held out, and are taken, for "
            f"{int(is_before.sum())} of {is_before.numel()} key heads"
        )
    print(f"use it: weft serve {source} --cache loki={out}")
