"""`weft bench serve`: a server under rising load."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from weft.commands.arguments import Json
from weft.commands.output import refuse_place, warn, write_result
from weft.errors import BAD_INPUT, ConfigError, LocalError

if TYPE_CHECKING:
    from weft.serve.load_generator import LoadOptions, RateResult

STOP_SECONDS = 60
USUAL_TOKENS = 48, 32  # of prompts and answers, in the mean


def bench_serve_command(
    target: Annotated[str, typer.Argument(help="the URL of a server, or what to serve meanwhile: a run or a folder")],
    rate: Annotated[
        float, typer.Option(help="requests a second to begin with; doubled until saturation", min=0.01)
    ] = 1,
    rates: Annotated[int, typer.Option(help="try at most so many rates", min=1, max=20)] = 10,
    requests: Annotated[int, typer.Option(help="at each rate", min=1, max=10_000)] = 50,
    prompt_tokens: Annotated[
        int | None, typer.Option(help="of a prompt, in the mean; 48, or what the context allows", min=1)
    ] = None,
    answer_tokens: Annotated[
        int | None, typer.Option(help="of an answer, in the mean; 32, or what the context allows", min=2)
    ] = None,
    seconds: Annotated[float, typer.Option(help="for a rate, at most", min=1, max=3600)] = 60,
    seed: Annotated[int, typer.Option(help="of arrivals, lengths and prompts")] = 0,
    api_key: Annotated[str | None, typer.Option(help="of the server", envvar="WEFT_API_KEY")] = None,
    out: Annotated[Path, typer.Option(help="write OUT.json and OUT.svg")] = Path("bench-serve"),
    as_json: Json = False,
) -> None:
    """Drive a server with requests at rising rates. At random times (Poisson). Measures the time to the first
    token, the time per token, and tokens/s.

    Prompts are random tokens; lengths are drawn evenly from half to one and a half times their means.
    """
    import asyncio  # takes a tenth of the time of weft --help

    from weft.serve.load_generator import HEAD, LoadOptions, svg, table_row

    places = _places(out)
    lengths = prompt_tokens, answer_tokens
    options = LoadOptions(rate, rates, requests, seconds=seconds, seed=seed)

    def tell(result: RateResult) -> None:
        if not as_json:
            print(table_row(result), flush=True)

    with _server(target) as url:
        if not as_json:
            print(HEAD, flush=True)
        model, options, results = asyncio.run(_measure(url, api_key, options, lengths, tell))
    table = {"model": model, "options": asdict(options), "rates": [asdict(one) for one in results]}
    means = f"prompts of {options.mean_prompt_tokens}, answers of {options.mean_answer_tokens} tokens in the mean"
    title = f"{model}: {means}"
    text = json.dumps(table, indent=2)
    for place, written in zip(places, (text + "\n", svg(results, title)), strict=True):
        write_result(place, written)
    print(text if as_json else f"wrote {places[0]} and {places[1]}")


def _places(out: Path) -> tuple[Path, Path]:
    """Returns the files that --out names: OUT.json and OUT.svg, also if OUT is one of them. Raises ConfigError if they
    cannot be written there.
    """
    name = out.stem if out.suffix in (".json", ".svg") else out.name
    if not name:
        raise ConfigError(f"--out {out} names no file; give the path of OUT.json and OUT.svg without .json")
    places = out.with_name(f"{name}.json"), out.with_name(f"{name}.svg")
    for place in places:
        refuse_place(place)
    return places


@contextmanager
def _server(target: str) -> Iterator[str]:
    """Yields the URL of a server: the one given, or that of one that serves a folder while the block runs."""
    if "://" in target:
        yield target
        return
    warn(f"starting weft serve {target}")
    command = [sys.executable, "-m", "weft", "serve", target, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            line = process.stdout.readline()
            if not line:
                status = process.wait()
                kind = ConfigError if status == BAD_INPUT else LocalError
                raise kind(f"weft serve {target} ended with status {status}; it says above why")
            yield json.loads(line)["url"]
        finally:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()


async def _measure(
    url: str,
    key: str | None,
    options: LoadOptions,
    lengths: tuple[int | None, int | None],
    tell: Callable[[RateResult], None],
) -> tuple[str, LoadOptions, list[RateResult]]:
    """Returns the model's name, the options with lengths that were given or that fit the server, and the results."""
    from weft.serve.load_generator import open_target, run_load

    target = await open_target(url, key)
    prompt, answer = usual_lengths(target.context_length)
    options = replace(options, mean_prompt_tokens=lengths[0] or prompt, mean_answer_tokens=lengths[1] or answer)
    return target.model, options, await run_load(target, options, tell)


def usual_lengths(context: int) -> tuple[int, int]:
    """Returns the mean tokens of prompts and answers if none are given: fewer if a context has no room for the longest,
    which have one and a half times as many.
    """
    share = min(1.0, context / (1.5 * sum(USUAL_TOKENS)))
    return max(1, int(USUAL_TOKENS[0] * share)), max(2, int(USUAL_TOKENS[1] * share))
