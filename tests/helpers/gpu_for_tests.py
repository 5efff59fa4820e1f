"""What the tests on a GPU share: `weft` as a command, jobs for children that use the GPU, and run files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from gpu_ranks_for_tests import JOBS as RANK_JOBS
from torch import nn

from weft.commands.jobs import JOBS as OWN_JOBS
from weft.plan import Plan
from weft.proof.prove import Trial, plan_to_prove, prove_plan
from weft.proof.report import ProofReport, report_from_json, report_to_json
from weft.schema import build_dataclass, to_table
from weft.step.objective import CROSS_ENTROPY

ROOT = Path(__file__).parents[2]
SECONDS = 240.0  # for a command


class Left(NamedTuple):
    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


def weft(*arguments: object, seconds: float = SECONDS, **environ: str) -> Left:
    """`weft ARGUMENTS` in a process of its own, as a user starts it."""
    return _run([sys.executable, "-m", "weft", *map(str, arguments)], seconds, environ)


def timed_weft(*arguments: object, seconds: float = SECONDS) -> list[tuple[float, str]]:
    """The lines that `weft ARGUMENTS` prints, each with the time at which it came; the command must succeed."""
    command = [sys.executable, "-u", "-m", "weft", *map(str, arguments)]
    with subprocess.Popen(
        command, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as own:
        timer = threading.Timer(seconds, own.kill)
        timer.start()
        assert own.stdout is not None
        lines = [(time.monotonic(), line) for line in own.stdout]
        timer.cancel()
    assert own.returncode == 0, "".join(line for _, line in lines)[-3000:]
    return lines


def run_program(path: Path, seconds: float = SECONDS) -> Left:
    """A user's own program."""
    return _run([sys.executable, str(path)], seconds, {})


def environment() -> dict[str, str]:
    """That of commands: with this tree's weft."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))}


def _run(command: list[str], seconds: float, environ: dict[str, str]) -> Left:
    done = subprocess.run(command, env=environment() | environ, capture_output=True, text=True, timeout=seconds)
    return Left(done.returncode, done.stdout, done.stderr)


def succeeded(left: Left) -> Left:
    assert left.status == 0, f"status {left.status}\n{left.out[-3000:]}\n{left.err[-3000:]}"
    return left


TEXT = """
name = "text"
folder = "{folder}/text"

[model]
architecture = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 4
num_attention_heads = 4
num_key_value_heads = 2

[data]
source = "stdlib"
tokenizer = "bytes"
sequence = 64
cache = "{folder}/cache"

[train]
steps = 8
batch = 16
learning_rate = 1e-3
compile = false
evaluate_every = 4
evaluate_sequences = 8

[checkpoint]
every = 4
"""

IMAGES = """
name = "images"
folder = "{folder}/images"

[model]
architecture = "resnet"
depth = 18
width = 8

[data]
kind = "slides"
images = 64
size = 64
held_out = 0.25

[train]
steps = 8
batch = 8
learning_rate = 1e-3
"""


def write_run(folder: Path, text: str = TEXT, more: str = "") -> Path:
    path = folder / "run.toml"
    path.write_text(text.replace("{folder}", str(folder)) + more)
    return path


def losses(folder: Path) -> dict[int, float]:
    """The loss of each step that a run has logged."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


# --- proofs in children


class Case(NamedTuple):
    """A model, its batches and a plan."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[torch.Tensor, ...]]
    plan: Plan
    ranks_per_node: int | None = None


def prove(fork_server: Any, table: str, name: str, **options: Any) -> ProofReport:
    """The report on a case of a module, from a child that shares the GPU with its ranks."""
    return report_from_json(fork_server.call("prove", table=table, name=name, **options))


def _prove(
    table: str, name: str, precision: str = "fp64", compiles: bool = False, spoiled: str = "", plan: Any = None
) -> dict[str, Any]:
    cases: dict[str, Case] = getattr(__import__(table), "CASES")  # noqa: B009 (by name)
    case = cases[name]
    own = case.plan if plan is None else build_dataclass(Plan, plan, "plan")
    if spoiled:
        SPOILERS[spoiled]()
    trial = Trial(plan_to_prove(own, precision), ranks_per_node=case.ranks_per_node, device="cuda", compiles=compiles)  # type: ignore[arg-type]
    return report_to_json(prove_plan(case.model, case.batch, CROSS_ENTROPY, trial, SECONDS))


def _skip_reductions() -> None:
    """Leave out every all-reduce of gradients: those of more than a few numbers."""
    import weft.comm.collectives as collectives

    whole = collectives.dist.all_reduce

    def skip(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return whole(torch.zeros_like(tensor) if tensor.numel() > 8 else tensor, *args, **kwargs)

    collectives.dist.all_reduce = skip  # type: ignore[attr-defined]


def _shift_wrongly() -> None:
    """Send to oneself what belongs to the neighbour: every message brings zeros."""
    import weft.comm.collectives as collectives

    whole = collectives.dist.isend

    def send(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        return whole(torch.zeros_like(tensor), *args, **kwargs)

    collectives.dist.isend = send  # type: ignore[attr-defined]


SPOILERS = {"reductions": _skip_reductions, "messages": _shift_wrongly}


def _about_gpus() -> dict[str, Any]:
    from weft.comm.backends import describe_backend

    return {"device": torch.cuda.get_device_name(), "collectives": describe_backend("cuda", 4)}


def _tokens(
    architecture: str, device: str, weights: str | None = None, cache: str | None = None, speculate: str | None = None
) -> dict[str, list[int]]:
    """What an engine answers to some requests, in fp32; on a CPU in fp64, as products with codes round inputs there."""
    from serving_for_tests import GREEDY, serve_all, tokens_of

    from weft.serve.attention.formats import block_size_of, cache_format
    from weft.serve.engine import Engine, EngineOptions
    from weft.serve.scheduling.request import Request
    from weft.serve.scheduling.speculation import LAYERS, early_layers
    from weft.serve.weights.packed_linear import pack_model
    from weft.serve.weights.weight_formats import FORMATS

    model = _small_model(architecture)
    if weights:
        pack_model(model, FORMATS[weights])
    kept = cache_format(cache)
    drafts = early_layers(speculate) if speculate and speculate.startswith(LAYERS) else speculate
    options = EngineOptions(context_length=256, cache=kept, block_size=block_size_of(kept), speculate=drafts)  # type: ignore[arg-type]
    requests = [Request(str(i), tuple((7 * i + j * j) % 512 for j in range(1 + 23 * i)), 40, GREEDY) for i in range(5)]
    model = model.eval().to(device, torch.float64 if device == "cpu" else torch.float32)
    return tokens_of(serve_all(Engine(model, options), requests))


def _embedded(device: str, cache: str | None) -> list[float]:
    """A text of several pages, in chunks, beside a request: in fp32 on a GPU, in fp64 on a CPU."""
    from weft.serve.attention.formats import block_size_of, cache_format
    from weft.serve.engine import Engine, EngineOptions
    from weft.serve.scheduling.request import Request

    kept, model = cache_format(cache), _small_model("llama").to(device, torch.float64 if device == "cpu" else None)
    engine = Engine(
        model, EngineOptions(context_length=256, cache=kept, block_size=block_size_of(kept), token_budget=80)
    )
    engine.add(Request("one", tuple(range(70)), 20))
    engine.step()
    return engine.embed([(7 * one) % 512 for one in range(230)], "mean").double().tolist()


def _small_model(architecture: str) -> nn.Module:
    """The likeliest tokens are likelier than others by more than rounding."""
    from weft.models import DecoderConfig, build, initialise

    if architecture in ("lstm", "gru"):
        from serving_for_tests import tiny_recurrent

        return tiny_recurrent(architecture, vocab_size=512, max_position_embeddings=256)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    more = {"num_experts": 4, "num_experts_per_tok": 2} if architecture == "mixtral" else {}
    more |= {"sliding_window": 37} if architecture == "mistral" else {}
    model = build(DecoderConfig(architecture, **sizes, num_attention_heads=4, num_key_value_heads=2, **more))  # type: ignore[arg-type]
    initialise(model, 0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model.eval()


def _lost_logits(architecture: str, weights: str | None = None) -> dict[str, float]:
    """By how much the tokens of an engine in bf16 on the GPU, whose steps are CUDA graphs, are less likely than the
    likeliest, by a plain forward in fp64: the highest difference of logits, and what 95 of 100 tokens stay below; that
    of tokens one place off as a control. Both with weights in a format if one is named.
    """
    from serving_for_tests import GREEDY, serve_all, tokens_of

    from weft.serve.engine import Engine, EngineOptions
    from weft.serve.scheduling.request import Request
    from weft.serve.weights.packed_linear import pack_model
    from weft.serve.weights.weight_formats import FORMATS

    plain, model = _small_model(architecture), _small_model(architecture)
    for one in (plain, model) if weights else ():
        pack_model(one, FORMATS[weights])  # type: ignore[index]
    plain.to(torch.float64)
    model.to("cuda", torch.bfloat16)
    requests = [Request(str(i), tuple((7 * i + j * j) % 512 for j in range(1 + 23 * i)), 40, GREEDY) for i in range(5)]
    engine = Engine(model, EngineOptions(context_length=256, token_budget=64))
    assert engine._mixed_graphs is not None
    found = tokens_of(serve_all(engine, requests, every=3))
    missed: tuple[list[float], list[float]] = ([], [])  # of the tokens, and of those one place off
    with torch.inference_mode():
        for one in requests:
            tokens = torch.tensor([[*one.tokens, *found[one.name]]])
            logits = plain(tokens)[0, len(one.tokens) - 1 : -1]
            for shift in (0, 1):
                chosen = logits.gather(1, tokens[0, len(one.tokens) :].roll(shift)[:, None])[:, 0]
                missed[shift].extend(((logits.max(-1).values - chosen) / logits.std()).tolist())
    lost, control = (torch.tensor(each).quantile(torch.tensor([0.95, 1.0])).tolist() for each in missed)
    return {
        "lost": lost[1],
        "mostly lost": lost[0],
        "one place off": control[0],
        "graphs": len(engine._mixed_graphs._steps),
    }


def _compiled_while_serving(way: str, warms_up: bool) -> list[str]:
    """The kernels that Triton compiles while an engine in bf16 answers requests of many lengths, alone and together."""
    import random

    from serving_for_tests import GREEDY
    from triton import knobs

    from weft.serve.attention.formats import block_size_of, cache_format
    from weft.serve.engine import Engine, EngineOptions
    from weft.serve.scheduling.request import Request
    from weft.serve.warm_up import WAYS, warm_up
    from weft.serve.weights.packed_linear import pack_model
    from weft.serve.weights.weight_formats import FORMATS

    model, rng, found = _small_model("llama"), random.Random(1), list[str]()
    if way in FORMATS:
        pack_model(model, FORMATS[way])
    kept = cache_format(way.removeprefix("cache ") if way.startswith("cache ") else None)
    given = {"num_blocks": 2000, "context_length": 512, "token_budget": 256, "max_running": 48}
    drafts = "ngram" if way == "ngram" else None
    options = EngineOptions(cache=kept, block_size=block_size_of(kept), device="cuda", speculate=drafts, **given)  # type: ignore[arg-type]
    engine = Engine(model.to("cuda", torch.bfloat16), options)
    if warms_up:
        warm_up(engine, options)
    knobs.runtime.jit_post_compile_hook = lambda *, fn, already_compiled, **_: found.append(fn.name)
    for number in (*[1] * 12, 40, 48, 48, 3, 7):
        for index in range(number):
            tokens = tuple(rng.choices(range(512), k=rng.randrange(8, 482)))
            sampling = rng.choice([GREEDY, *WAYS])
            engine.add(Request(f"{number} {index}", tokens, rng.randrange(1, 12), sampling))
        while engine.has_work():
            engine.step()
    torch.cuda.synchronize()
    return found


def _peaks(name: str, late: str = "") -> tuple[list[int], list[int]]:
    """Measured and predicted memory of each rank of a pipeline (`freeing_for_tests.py`)."""
    from freeing_for_tests import LARGE, peaks

    return peaks(name, LARGE, "cuda", late)


JOBS = {
    **OWN_JOBS,
    **RANK_JOBS,
    "prove": _prove,
    "tokens": _tokens,
    "embedded": _embedded,
    "lost_logits": _lost_logits,
    "peaks": _peaks,
    "compiled_while_serving": _compiled_while_serving,
}


def ran(what: str) -> dict[str, Any]:
    """The answer of a question about the GPU, from a fresh process: this one does not touch it."""
    if not torch.cuda.is_available():
        return {"device": None}
    code = "import json, gpu_for_tests as g; print(json.dumps(g._about_gpus()))"
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "tests" / "helpers"), *filter(None, sys.path)]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, timeout=120)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {"device": what}
    return found


__all__ = ["IMAGES", "TEXT", "Case", "losses", "prove", "succeeded", "to_table", "weft", "write_run"]


@contextmanager
def serving(run: Path, *options: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process of a server, and its URL."""
    if find_spec("uvicorn") is None or find_spec("starlette") is None:
        pytest.skip("starlette and uvicorn are not installed: pip install weft[serve]")
    command = [sys.executable, "-m", "weft", "serve", str(run), *options, "--port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment()) as process:
        assert process.stdout is not None
        try:
            about = json.loads(process.stdout.readline())
            assert about["device"].startswith("cuda")
            yield process, about["url"]
        finally:
            process.kill()


def post(url: str, body: object) -> tuple[int, dict[str, object]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
