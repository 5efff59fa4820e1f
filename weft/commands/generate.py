"""`weft generate`: continues a prompt with a trained model."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from weft.commands import PROMPT
from weft.commands.arguments import Json, Source
from weft.commands.output import print_text, warn
from weft.commands.serving_options import Given, takes_options


@takes_options("generate")
def generate_command(
    source: Source,
    prompt: Annotated[str, typer.Option(help="the text to continue")] = PROMPT,
    tokens: Annotated[int, typer.Option(help="how many tokens at most", min=1, max=100_000)] = 200,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token", min=0.0, max=10.0)] = 0.8,
    top_k: Annotated[int | None, typer.Option(help="choose among the k likeliest", min=1)] = 50,
    seed: Annotated[int, typer.Option(help="of the sampling")] = 0,
    *,
    given: Given,
    as_json: Json = False,
) -> None:
    """Continue a prompt with a trained model, on one process."""
    spec = given()
    from rich.console import Console

    from weft.serve.attention.formats import cache_format, why_slow
    from weft.serve.generate import generate
    from weft.serve.head.graph_head import graph_head
    from weft.serve.loading import load_draft, load_model, model_config
    from weft.serve.refusals import ServingCase, kind_of, refuse
    from weft.serve.weights.packed_linear import what_cpus_do

    with Console(stderr=True).status("generating"):
        cache = cache_format(spec.cache)
        refuse(ServingCase.of(spec, model=kind_of(model_config(source)), device=spec.device, cache=cache))
        loaded = load_model(source, spec, spec.device, warn)
        model, tokens_of = loaded.model, loaded.tokenizer
        for reason in what_cpus_do(model) if spec.device == "cpu" else ():
            warn(reason)
        for reason in why_slow(cache, spec.device, next(model.parameters()).dtype):
            warn(reason)
        text = generate(
            model,
            tokens_of,
            prompt,
            num_tokens=tokens,
            temperature=temperature,
            top_k=top_k,
            seed=seed,
            context=loaded.context_length,
            speculate=load_draft(spec, tokens_of, spec.device),
            cache=cache,
            head=graph_head(spec.head),
            stop_tokens=loaded.end_tokens,
        )
    if as_json:
        print(json.dumps({"prompt": prompt, "text": text}))
    else:
        print_text(prompt + text)
