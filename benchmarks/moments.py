"""What few bits of AdamW's moments do to a loss curve: a small decoder learns a random Markov chain with moments in
fp32, bf16 and 8 bits, and with 8-bit codes rounded fairly as roots, which raises moments from step to step.

    python benchmarks/moments.py [--steps 400] [--seeds 2] [--out benchmarks/results/moments-cpu.json]
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import harness
import torch
from torch import Tensor

from weft.mesh import Mesh
from weft.models import DecoderConfig, build, initialise
from weft.optim import AdamW, rounding, update
from weft.parallel.apply import parallelize
from weft.parallel.model_state import all_units
from weft.plan import Memory, Plan
from weft.step.train_step import train_step

VOCABULARY, SEQUENCE, BATCH = 64, 32, 16
EXACT = Plan(precision="fp32")
PLANS = {
    "fp32": EXACT,
    "bf16": replace(EXACT, exact=False, memory=Memory(state="bf16")),
    "int8": replace(EXACT, exact=False, memory=Memory(state="int8")),
}


def chain(seed: int) -> Tensor:
    """Probabilities of the next token: a few follow each."""
    logits = 2.5 * torch.randn(VOCABULARY, VOCABULARY, generator=torch.Generator().manual_seed(seed))
    return logits.softmax(-1)


def batch(probabilities: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (BATCH, 1), generator=generator)
    for _ in range(SEQUENCE):
        following = torch.multinomial(probabilities[tokens[:, -1]], 1, generator=generator)
        tokens = torch.cat([tokens, following], dim=1)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


@contextmanager
def fair_to_roots() -> Iterator[None]:
    """Codes go up with the probability of the distance of roots, not of values."""

    def codes(values: Tensor, draw: Tensor, levels: float, root: float) -> tuple[Tensor, Tensor]:
        blocks, scales = rounding._blocks(values)
        missing = -draw.numel() % blocks.shape[1]
        fraction = torch.nn.functional.pad(draw, (0, missing)).view(blocks.shape).float() / 65536
        roots = (blocks.abs() / scales.clamp(min=1e-38).unsqueeze(1)) ** root * levels
        return (roots + fraction).floor().clamp(max=levels) * blocks.sign(), scales

    def signed(values: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        found, scales = codes(values, draw, 127.0, 0.5)
        return found.to(torch.int8).view(-1)[: values.numel()], scales

    def square(values: Tensor, draw: Tensor) -> tuple[Tensor, Tensor]:
        found, scales = codes(values, draw, 255.0, 0.25)
        found = torch.where(rounding._blocks(values)[0] > 0, found.clamp(min=1.0), found)
        return found.to(torch.uint8).view(-1)[: values.numel()], scales

    with patch.object(update, "signed_codes", signed), patch.object(update, "square_codes", square):
        yield


def train(plan: Plan, steps: int, seed: int) -> list[float]:
    """The losses."""
    config = DecoderConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    model, mesh = build(config), Mesh(plan)
    initialise(model, seed)
    model = parallelize(model, plan, mesh)
    options = {"lr": 3e-3, "betas": (0.9, 0.999), "weight_decay": 0.0}
    # One rank with one precision is held plainly, for any optimizer.
    optimizer = AdamW(model, **options) if all_units(model) else torch.optim.AdamW(model.parameters(), **options)
    probabilities, generator = chain(seed), torch.Generator().manual_seed(seed)
    return [float(train_step(model, optimizer, [batch(probabilities, generator)], mesh).loss) for _ in range(steps)]


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    results = {}
    for name in (*PLANS, "int8, fair to roots"):
        found = []
        for seed in range(given.seeds):
            if name in PLANS:
                found.append(train(PLANS[name], given.steps, seed))
            else:
                with fair_to_roots():
                    found.append(train(PLANS["int8"], given.steps, seed))
        last = [sum(losses[-50:]) / len(losses[-50:]) for losses in found]
        results[name] = {"mean_of_last_50": last, "every_20th": [losses[::20] for losses in found]}
        print(f"{name:20} mean of the last 50 losses {last}", flush=True)
    if given.out is not None:
        harness.write(given.out, {"steps": given.steps, "results": results}, device="cpu")


if __name__ == "__main__":
    main()
