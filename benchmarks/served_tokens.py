"""Records the tokens and log-probabilities of served models under every configuration, or compares them with a record.

    python benchmarks/served_tokens.py --record before.json
    (change the code)
    python benchmarks/served_tokens.py --compare before.json

Use it before and after a change that must leave every bit of serving as it is, on the same machine. Two models are
served on a CPU, with formats of weights, formats of the cache, drafts, streamed weights, too little memory, and over
ranks. A configuration that is refused is recorded by its error's kind.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import cycle
from pathlib import Path
from typing import Any

import harness
import torch
from torch import nn

from weft.errors import WeftError
from weft.launch.local_ranks import run_local
from weft.mesh import Mesh
from weft.models import GPT2, Decoder, DecoderConfig, GPT2Config, build, initialise
from weft.plan import Context, Pipe, Plan, Tensor
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import cache_format, save_loki
from weft.serve.calibration.loki_calibration import calibrate
from weft.serve.engine import Engine
from weft.serve.follow_steps import follow_steps
from weft.serve.model.model_part import EngineOptions, ModelPart
from weft.serve.model.ranks import ServingRanks
from weft.serve.parallel.rank_part import build_part, build_whole, read_part, refuse_plan
from weft.serve.scheduling.request import GeneratedToken, Request, Sampling
from weft.serve.scheduling.speculation import DraftLengths, EarlyLayers
from weft.serve.weights.packed_linear import make_room, pack_head
from weft.serve.weights.weight_formats import FORMATS

CONTEXT, VOCAB, LIMIT_SECONDS = 192, 256, 300.0
SIZES = {"vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": CONTEXT}
MODELS: dict[str, DecoderConfig | GPT2Config] = {
    "qwen3": DecoderConfig("qwen3", **SIZES, **HEADS),  # type: ignore[arg-type]
    "mistral": DecoderConfig("mistral", sliding_window=20, **SIZES, **HEADS),  # type: ignore[arg-type]
    "mixtral": DecoderConfig("mixtral", num_experts=4, num_experts_per_tok=2, **SIZES, **HEADS),  # type: ignore[arg-type]
    "gpt2": GPT2Config(vocab_size=VOCAB, n_positions=CONTEXT, n_embd=128, n_layer=2, n_head=4),
}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp64": torch.float64}
CHOICE = LokiChoice(dims=0.5, tokens=0.3, newest=4, dense_below=12)
PLANS = {
    "": Plan(),
    "x2": Plan(tensor=Tensor(2)),
    "y2": Plan(tensor=Tensor(1, 2)),
    "pipe2": Plan(pipe=Pipe(2)),
    "context2": Plan(context=Context(2)),
    "expert2": Plan(expert=2),
}


@dataclass(frozen=True)
class Case:
    """One configuration."""

    model: str
    dtype: str = "fp32"
    weights: str | None = None
    cache: str | None = None
    head: str | None = None
    drafts: str | None = None
    streamed: int = 0
    is_scarce: bool = False  # few blocks, and prompts in chunks
    plan: str = ""

    @property
    def name(self) -> str:
        return " ".join(f"{key}={value}" for key, value in vars(self).items() if value)


def cases() -> Iterator[Case]:
    """Every configuration that is recorded."""
    for model in MODELS:
        for is_scarce in (False, True):
            yield Case(model, is_scarce=is_scarce)
        for dtype in ("bf16", "fp64"):
            yield Case(model, dtype)
        for cache in ("int4", "loki"):
            for drafts in (None, "ngram", "layers"):
                yield Case(model, cache=cache, drafts=drafts, is_scarce=drafts is None)
        for drafts in ("ngram", "layers"):
            yield Case(model, drafts=drafts)
        for plan in PLANS:
            yield Case(model, "fp64", is_scarce=True, plan=plan)
            for cache in ("int4", "loki"):
                yield Case(model, "fp64", cache=cache, plan=plan)
    for model in ("qwen3", "mixtral"):
        for dtype in ("fp32", "bf16"):
            yield from (Case(model, dtype, weights) for weights in FORMATS)
        for weights in (None, "int8", "int4"):
            yield Case(model, weights=weights, streamed=1)
            yield Case(model, weights=weights, plan="x2")
            yield Case(model, weights=weights, plan="pipe2", streamed=1)
    for head in ("int8", "int4", "int8-row", "fp16"):
        yield Case("qwen3", head=head)


def values_of(model: str) -> dict[str, torch.Tensor]:
    """The values of a model's parameters, by name. Every one of them matters to its tokens."""
    whole = build(MODELS[model])
    initialise(whole, 0)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return {name: parameter.detach() for name, parameter in whole.named_parameters()}


def load(case: Case, ranks: ServingRanks | None) -> nn.Module:
    """The model of a case, or the part of a rank."""
    config, values = MODELS[case.model], values_of(case.model)
    model, cuts = build_whole(config) if ranks is None else build_part(config, ranks.place)
    assert isinstance(model, Decoder | GPT2)
    model.to(DTYPES[case.dtype])
    if case.weights is not None:
        make_room(model, FORMATS[case.weights])
    read_part(model, cuts, values.__getitem__, "cpu")
    pack_head(model, case.head, "cpu")
    return model.eval()


def requests() -> list[Request]:
    """Greedy, seeded and penalised ones; two have the same beginning, and one repeats itself."""
    rng = random.Random(0)
    prompts = [tuple(rng.randrange(VOCAB) for _ in range(length)) for length in (1, 9, 33, 70)]
    shared = tuple(range(40))
    prompts += [(*shared, 3), (*shared, 4), (5, 6, 7, 8) * 6]
    samplings = [Sampling(temperature=0, num_logprobs=3), Sampling(seed=3, num_logprobs=3)]
    samplings += [Sampling(temperature=0.7, top_k=20, seed=5, repetition_penalty=1.2, num_logprobs=3)]
    return [
        Request(str(index), prompt, 16, samplings[0 if index % 3 else index // 3])
        for index, prompt in enumerate(prompts)
    ]


def options_of(case: Case, axes: Path) -> EngineOptions:
    """How a case is served. `axes` is a folder of files with the axes of keys, one for each model."""
    name = case.cache and case.cache.replace("loki", f"loki={axes / case.model}.safetensors")
    form = cache_format(name)
    block_size = form.block_size or 16
    degree = PLANS[case.plan].context.degree
    options = EngineOptions(
        block_size=block_size if form.block_size else block_size // degree,
        num_blocks=6 * 64 // block_size if case.is_scarce else None,
        token_budget=24 if case.is_scarce else 512,
        max_running=4,
        context_length=CONTEXT,
        cache=form,
        stream_weights=case.streamed,
        speculate={None: None, "ngram": "ngram", "layers": EarlyLayers(1)}[case.drafts],  # type: ignore[arg-type]
    )
    return options if case.is_scarce else replace(options, num_blocks=40)


def generated(engine: Engine) -> list[GeneratedToken]:
    """All that the engine answers to the requests, of which one arrives each step."""
    waiting, answers = requests(), list[GeneratedToken]()
    while waiting or engine.has_work():
        if waiting:
            engine.add(waiting.pop(0))
        answers += engine.step()
    engine.close()
    return answers


def answers_of(case: Case, axes: Path) -> dict[str, Any] | None:
    """The tokens of each request, and a hash of all log-probabilities. None on ranks that follow."""
    ranks = ServingRanks(Mesh(PLANS[case.plan])) if case.plan else None
    model, options = load(case, ranks), options_of(case, axes)
    if ranks is not None and not ranks.is_lead:
        follow_steps(ModelPart(model, options, ranks))
        return None
    tokens: dict[str, list[int]] = {}
    digest = hashlib.sha256()
    for one in sorted(generated(Engine(model, options, ranks)), key=lambda one: one.request):
        tokens.setdefault(one.request, []).append(one.token)
        digest.update(repr(one.logprobs).encode())
    return {"tokens": tokens, "logprobs": digest.hexdigest()[:16]}


def record(case: Case, axes: Path) -> dict[str, Any]:
    """What a case answers, or the kind of error that refuses it."""
    try:
        if not case.plan:
            return answers_of(case, axes) or {}
        plan = PLANS[case.plan]
        refuse_plan(MODELS[case.model], plan)

        def rank(_: int) -> dict[str, Any] | None:
            torch.set_num_threads(1)
            return answers_of(case, axes)

        return run_local(rank, 2, LIMIT_SECONDS)[0] or {}
    except WeftError as error:
        return {"refused": type(error).__name__}


def choose_without_clocks() -> None:
    """Three drafts, and a CPU's products with codes wherever there are any, whichever is faster at this moment."""
    setattr(DraftLengths, "wanted", lambda own, active: 3)  # noqa: B010
    seconds = cycle((0.0, 1.0))  # each comparison measures the product with codes first
    for module in list(sys.modules.values()):
        if module.__name__.startswith("weft.serve") and hasattr(module, "least_seconds"):
            setattr(module, "least_seconds", lambda compute: next(seconds))  # noqa: B010


def main() -> None:
    parser = harness.options(__doc__)
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--record", type=Path, help="the file to write")
    where.add_argument("--compare", type=Path, help="a file that --record wrote")
    parser.add_argument("--only", default="", help="cases whose name has this text")
    given = parser.parse_args()
    torch.set_num_threads(1)
    choose_without_clocks()
    known = json.loads(given.compare.read_text()) if given.compare else {}
    found, different = {}, list[str]()
    with tempfile.TemporaryDirectory() as folder:
        texts = [torch.randint(0, VOCAB, (4, 64), generator=torch.Generator().manual_seed(0))]
        for model in MODELS:
            loki = calibrate(load(Case(model), None), texts, CHOICE).loki
            save_loki(Path(folder) / f"{model}.safetensors", loki)
        for case in (one for one in cases() if given.only in one.name):
            found[case.name] = record(case, Path(folder))
            if given.compare and found[case.name] != known.get(case.name):
                before, after = known.get(case.name, {}), found[case.name]
                is_same_text = before.get("tokens") == after.get("tokens")
                different.append(case.name)
                print(f"DIFFERS{' in log-probabilities alone' if is_same_text else ''}: {case.name}", flush=True)
            print(f"\r{len(found)} cases", end="", file=sys.stderr)
    print(file=sys.stderr)
    if given.record:
        given.record.write_text(json.dumps(found, indent=1))
    refused = sum("refused" in one for one in found.values())
    print(f"{len(found)} cases, {refused} refused" + (f", {len(different)} differ" if given.compare else ""))
    sys.exit(bool(different))


if __name__ == "__main__":
    main()
