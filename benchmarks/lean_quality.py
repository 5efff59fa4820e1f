"""What each way to read fewer bytes does to a trained model: perplexity a token, and bytes of weights and cache.

    weft train examples/quickstart.toml data.sequence=256
    python benchmarks/lean_quality.py runs/quickstart [--rows 32] [--out benchmarks/results/lean-quality-cpu.json]

The same for a model with experts, in benchmarks/results/lean-quality-experts-cpu.json:

    weft train examples/quickstart.toml name=experts data.sequence=256 model.architecture=mixtral model.num_experts=8 \\
      model.num_experts_per_tok=2 model.intermediate_size=128 plan.data=1 plan.shard.degree=1 plan.micro_batch=16 \\
      train.batch=16 train.steps=300

Texts are Python source: that of tests/ calibrates, that of weft/ is measured. Where decodes attend to chosen tokens
(Loki), every token is computed by a decode; elsewhere a row is computed at once.
Speculative decoding changes no token; its acceptance and CPU time are measured on greedy answers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import harness
import torch
from torch import Tensor, nn

from weft.data.tokenizer import Tokenizer
from weft.serve.attention.choice import LokiChoice
from weft.serve.attention.formats import CacheFormat, Loki
from weft.serve.attention.four_bits import GROUPS, FourBitStorage
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.calibration.loki_calibration import calibrate
from weft.serve.engine import Engine, EngineOptions
from weft.serve.loading import load_for_generation
from weft.serve.model.model_part import ModelPart
from weft.serve.model.step_inputs import StepInputs, text_inputs
from weft.serve.scheduling.request import Request, Sampling
from weft.serve.weights.cpu_products import why_dequantised
from weft.serve.weights.packed_experts import PackedStack
from weft.serve.weights.packed_linear import PackedLinear, pack_head, pack_model
from weft.serve.weights.weight_formats import FORMATS

ROOT = Path(__file__).parents[1]
LOKI = LokiChoice(dims=0.25, tokens=0.25, newest=16, dense_below=64)  # contexts are short here


def rows_of(folder: str, tokenizer: Tokenizer, number: int, width: int) -> Tensor:
    """Rows of tokens, spread over the source files of a folder."""
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted((ROOT / folder).rglob("*.py")))
    tokens = torch.from_numpy(tokenizer.encode(text).astype("int64"))
    every = tokens[: len(tokens) // width * width].view(-1, width)
    return every[:: max(1, len(every) // number)][:number]


@torch.inference_mode()
def perplexity(model: nn.Module, rows: Tensor, form: CacheFormat, by_codes: bool = False) -> float:
    """exp of the mean loss of all tokens but the first. `by_codes`: by a CPU's products with codes."""
    number, width = rows.shape
    size = form.block_size or 16
    blocks = -(-width // size)
    options = EngineOptions(block_size=size, num_blocks=number * blocks, max_running=number, cache=form)
    part = ModelPart(model, options)
    for linear in (*(one.layer for block in part.paged.blocks for one in block.linears), part.paged.model.lm_head):
        if isinstance(linear, PackedLinear):
            assert linear.for_cpu is not None or not by_codes, "this CPU has no products with codes"
            linear.for_cpu = replace(linear.for_cpu, max_rows=width) if by_codes and linear.for_cpu else None
    for stack in (one for one in model.modules() if isinstance(one, PackedStack)):
        stack.for_cpu = [replace(one, max_rows=width) for one in stack.for_cpu if one is not None] if by_codes else []
    if form.loki is None:
        losses = [float(row_loss(part, row)) for row in rows]
        return math.exp(sum(losses) / (number * (width - 1)))
    table = torch.arange(number * blocks, dtype=torch.int32).view(number, blocks)
    total = 0.0
    for place in range(width - 1):
        slots = table[:, place // size] * size + place % size
        places, unknown = torch.full_like(slots, place), torch.full_like(slots, -1)
        flat = torch.stack([rows[:, place].to(torch.int32), unknown, places, slots])
        head = torch.stack([places + 1, torch.arange(number, dtype=torch.int32)], dim=1)
        inputs = StepInputs(flat, torch.cat([head, table], 1), [1] * number, number, list(range(number)))
        found = part.logits(inputs)
        assert found is not None
        total += float(nn.functional.cross_entropy(found[0].double(), rows[:, place + 1], reduction="sum"))
    return math.exp(total / (number * (width - 1)))


def row_loss(part: ModelPart, row: Tensor) -> Tensor:
    """The sum of losses of a row that is computed at once."""
    hidden = part.hidden_states(text_inputs(row.tolist(), part.layout.block_size))
    assert hidden is not None
    logits = part.paged.model.lm_head(hidden)
    return nn.functional.cross_entropy(logits[:-1].double(), row[1:], reduction="sum")


def random_axes(found: Loki) -> Loki:
    """The control: axes that have nothing to do with the keys."""
    generator = torch.Generator().manual_seed(0)
    shape = found.axes.shape
    return Loki(torch.linalg.qr(torch.randn(shape, generator=generator, dtype=torch.float64))[0], found.choice)


def speculation(read: Callable[[], nn.Module], rows: Tensor, width: int) -> dict[str, Any]:
    """Greedy answers with and without drafts by lookup: equal tokens, acceptance, CPU seconds."""
    found: dict[str, Any] = {}
    answers = []
    for speculate in (None, "ngram"):
        engine = Engine(read(), EngineOptions(num_blocks=600, context_length=width, speculate=speculate))  # type: ignore[arg-type]
        for index, row in enumerate(rows.tolist()):
            engine.add(Request(str(index), tuple(row[: width // 2]), width // 2 - 1, Sampling(temperature=0)))
        tokens: dict[str, list[int]] = {}
        began, num_steps = time.process_time(), 0
        while engine.has_work():
            num_steps += 1
            for one in engine.step():
                tokens.setdefault(one.request, []).append(one.token)
        state = engine.state()
        about = {"cpu_seconds": time.process_time() - began, "steps": num_steps, "tokens": state.num_generated}
        if speculate:
            about |= {"drafted": state.num_drafted, "accepted": state.num_accepted}
        found[speculate or "without"] = about
        answers.append(tokens)
    return {**found, "equal": answers[0] == answers[1]}


def main() -> None:
    parser = harness.options(__doc__, "lean-quality-cpu.json")
    parser.add_argument("run", type=Path)
    parser.add_argument("--rows", type=int, default=32)
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, tokenizer, width = load_for_generation(options.run)
    rows, calibration = (rows_of(one, tokenizer, options.rows, width) for one in ("weft", "tests"))

    def read() -> nn.Module:
        return load_for_generation(options.run)[0]

    def packed(name: str, corrects: bool) -> nn.Module:
        model = read()
        if corrects:
            pack_corrected(model, FORMATS[name], list(calibration.split(8)))
        else:
            pack_model(model, FORMATS[name])
        return model

    loki, explained, is_before = calibrate(read(), [calibration], LOKI)
    print(f"{int(is_before.sum())} of {is_before.numel()} key heads have axes of keys before rotation")
    cases: dict[str, tuple[nn.Module, CacheFormat]] = {"dense": (read(), CacheFormat())}
    cases |= {f"weights {name}": (packed(name, False), CacheFormat()) for name in FORMATS}
    cases |= {f"weights {name}, corrected": (packed(name, True), CacheFormat()) for name in ("int4", "int4-128")}
    cases |= {f"cache {form.name}": (read(), form) for form in (CacheFormat(FourBitStorage(group)) for group in GROUPS)}
    axes = {"cache loki": loki, "cache loki, random axes": random_axes(loki)}
    cases |= {name: (read(), CacheFormat(loki=one)) for name, one in axes.items()}
    cases["weights int4, cache int4"] = (packed("int4", True), CacheFormat(FourBitStorage()))
    for name in ("fp16", "int8-row", "int8", "int4"):
        model = packed(name, False)
        pack_head(model, name, "cpu")
        if reason := why_dequantised(FORMATS[name], model.lm_head.in_features, torch.float32):
            print(f"weights and head {name}, by codes: not here, as {reason}")
        else:
            cases[f"weights and head {name}, by codes"] = (model, CacheFormat())
    found: dict[str, Any] = {}
    for name, (model, form) in cases.items():
        weights = sum(one.numel() * one.itemsize for one in (*model.parameters(), *model.buffers()))
        found[name] = {
            "perplexity": perplexity(model, rows, form, name.endswith("by codes")),
            "weight_bytes_fp32": weights,
        }
        print(f"{name:28} {found[name]['perplexity']:.4f}  {weights:,} bytes of weights", flush=True)
    drafts = speculation(read, rows[:8], width)
    print("speculation", drafts)
    about = {"tokens": rows.numel(), "context": width}
    result = {"about": about, "found": found, "speculation": drafts, "explained": explained.mean(1).tolist()}
    harness.write(options.out, result, device="cpu")


if __name__ == "__main__":
    main()
