"""What weft's loop costs over a bare hand-written PyTorch loop: the same model, batch and optimizer, on one process.

Steps alternate: after each of weft's steps the bare loop makes one of its own, so both meet the same weather on a noisy
machine. The result is the ratio of the median step times. Aim: at most 1.03.

    python benchmarks/overhead.py [--steps 40] [--device cpu|cuda] [--precision fp32|bf16]
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from pathlib import Path

import harness
import numpy as np
import torch
import torch.nn.functional as F

from weft.launch.environment import RankInfo
from weft.models import build, initialise
from weft.run_file import Run, run_from_tables
from weft.train.batches import prepare_data
from weft.train.loop import train
from weft.train.metrics import StepMetrics

MODELS = {
    "cpu": {"hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6, "num_attention_heads": 6},
    "cuda": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32},
}
BATCHES = {"cpu": (16, 128), "cuda": (8, 2048)}  # sequences, tokens


class BareLoop:
    """What one would write by hand."""

    def __init__(self, run: Run, tokens: np.ndarray, device: str) -> None:
        self.run, self.tokens, self.device = run, tokens, device
        self.model = build(run.model).to(device)
        initialise(self.model, 0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, betas=(0.9, 0.95), fused=True)
        self.rng = np.random.default_rng(0)

    def step(self) -> float:
        length = self.run.data.sequence
        starts = self.rng.integers(0, len(self.tokens) - length - 1, self.run.split.batch)
        rows = torch.from_numpy(np.stack([self.tokens[s : s + length + 1] for s in starts]).astype(np.int64))
        rows = rows.to(self.device, non_blocking=True)
        with torch.autocast(self.device, torch.bfloat16, enabled=self.run.plan.precision == "bf16"):
            logits = self.model(rows[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())


class Alternate:
    """Weft's reporter: times weft's step that just ended, then makes and times one bare step."""

    def __init__(self, bare: BareLoop) -> None:
        self.bare = bare
        self.weft_seconds: list[float] = []
        self.bare_seconds: list[float] = []
        self._start = self._now()

    def step(self, metrics: StepMetrics) -> None:
        between = self._now()
        self.weft_seconds.append(between - self._start)
        self.bare.step()
        self._start = self._now()
        self.bare_seconds.append(self._start - between)

    def say(self, message: str) -> None:
        print(message)

    def _now(self) -> float:
        if self.bare.device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--precision", default="fp32", choices=["fp32", "bf16"])
    parser.add_argument("--out", type=Path, default=harness.RESULTS, help="the folder to write to")
    arguments = parser.parse_args()
    sequences, length = BATCHES[arguments.device]
    with tempfile.TemporaryDirectory() as folder:
        tables = {
            "folder": f"{folder}/run",
            "model": MODELS[arguments.device],
            "data": {"source": "stdlib", "sequence": length, "cache": f"{folder}/cache", "held_out": 0.0},
            "train": {"steps": arguments.steps, "batch": sequences, "device": arguments.device, "schedule": "constant"},
            "plan": {"precision": arguments.precision},
        }
        run = run_from_tables(tables, {}, "overhead")
        bare = BareLoop(run, prepare_data(run).train._tokens, arguments.device)
        alternate = Alternate(bare)
        train(run, RankInfo(), alternate)
    warm = min(10, arguments.steps // 4)
    weft, plain = (statistics.median(times[warm:]) for times in (alternate.weft_seconds, alternate.bare_seconds))
    result = {
        "ratio": weft / plain,
        "aim": 1.03,
        "weft_step_seconds": weft,
        "bare_step_seconds": plain,
        "steps_measured": arguments.steps - warm,
        "precision": arguments.precision,
        "batch": [sequences, length],
        "model": MODELS[arguments.device],
        "threads": torch.get_num_threads(),
    }
    name = f"overhead-{arguments.device}-{arguments.precision}.json"
    harness.write(arguments.out / name, result, device=arguments.device)
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
