"""What the first clients of `weft serve` wait for: the time to the first token of the first requests after it is ready,
against that of later ones, by HTTP.

    python benchmarks/first_tokens.py --out benchmarks/results/first-tokens.json      # Llama 1.2B, random weights
    python benchmarks/first_tokens.py --tiny --device cpu                             # a tiny model; printed only

The server starts three times: with an empty folder of compiled kernels, with the one of the first start, and with an
empty one and --no-warm-up. Prompts are random tokens, so the prefix cache has none of them.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import harness
import torch

from weft.models import DecoderConfig, build, initialise, save_folder

LENGTHS = (8, 17, 33, 64, 100, 131, 200, 255, 340, 481)
NUM_TOKENS, BURST = 16, 40
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
SIZES = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16}


def main() -> None:
    parser = harness.options(__doc__, tiny="a tiny model")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--starts", type=int, default=3, help="of the three starts, the first so many")
    parser.add_argument("more", nargs="*", help="options of weft serve, after --")
    given = parser.parse_args()
    found: dict[str, Any] = {"options": given.more}
    with tempfile.TemporaryDirectory() as folder:
        source = write_model(Path(folder) / "model", TINY if given.tiny else SIZES)
        first, other = Path(folder) / "kernels", Path(folder) / "more kernels"
        cases = {"first start": (first, []), "second start": (first, []), "no warm-up": (other, ["--no-warm-up"])}
        for name, (kernels, options) in list(cases.items())[: given.starts]:
            more = ["--device", given.device, *options, *given.more]
            found[name] = start(source, more, kernels)
            print(name, json.dumps(found[name], indent=1), flush=True)
    if given.out is not None:
        harness.write(given.out, found, device=given.device)


def write_model(folder: Path, sizes: dict[str, int]) -> Path:
    config = DecoderConfig(vocab_size=32_000, num_attention_heads=16, num_key_value_heads=8, **sizes)  # type: ignore[arg-type]
    model = build(config)
    initialise(model, 0)
    save_folder(folder, model.to(torch.bfloat16))  # type: ignore[arg-type]
    return folder


def start(source: Path, options: list[str], kernels: Path) -> dict[str, Any]:
    """Start a server, and ask it as its first clients do."""
    command = [sys.executable, "-m", "weft", "serve", str(source), "--tokenizer", "bytes", "--port", "0", "--json"]
    environ = {**os.environ, "TRITON_CACHE_DIR": str(kernels)}
    began = time.monotonic()
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True, env=environ) as process:
        assert process.stdout is not None
        try:
            about = json.loads(process.stdout.readline())
            seconds = time.monotonic() - began
            found = ask(urlsplit(about["url"]).netloc, random.Random(0))
        finally:
            process.terminate()
    return {"seconds to ready": seconds, "of them warming up": about["warm_up_seconds"], **found}


def ask(place: str, rng: random.Random) -> dict[str, Any]:
    """First tokens in milliseconds, of requests one after the other and in bursts."""
    rounds = [[1e3 * first_token(place, rng, length) for length in LENGTHS] for _ in range(4)]
    warm = [statistics.median(one) for one in zip(*rounds[1:], strict=True)]
    bursts = [burst(place, rng) for _ in range(4)]
    return {
        "first requests, ms": {length: round(one, 2) for length, one in zip(LENGTHS, rounds[0], strict=True)},
        "later ones, ms": {length: round(one, 2) for length, one in zip(LENGTHS, warm, strict=True)},
        "worst ratio": max(one / later for one, later in zip(rounds[0], warm, strict=True)),
        f"bursts of {BURST}, median and last, ms": [[round(1e3 * one, 2) for one in times] for times in bursts],
    }


def first_token(place: str, rng: random.Random, length: int) -> float:
    """Seconds from a request to its first token."""
    body = {"model": "model", "prompt": [rng.randrange(256) for _ in range(length)], "max_tokens": NUM_TOKENS}
    connection = http.client.HTTPConnection(place, timeout=120)
    connection.connect()
    began = time.perf_counter()
    text = json.dumps({**body, "stream": True, "temperature": rng.choice((0, 1))})
    connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    while not (line := answer.readline()).startswith(b"data:"):
        assert answer.status == 200, line
    seconds = time.perf_counter() - began
    answer.read()
    connection.close()
    return seconds


def burst(place: str, rng: random.Random) -> tuple[float, float]:
    """The median and the longest time to a first token of requests that come together."""
    lengths = [rng.randrange(8, 482) for _ in range(BURST)]
    draws = [random.Random(rng.random()) for _ in lengths]
    with ThreadPoolExecutor(BURST) as pool:
        times = list(pool.map(lambda rng, length: first_token(place, rng, length), draws, lengths))
    return statistics.median(times), max(times)


if __name__ == "__main__":
    main()
