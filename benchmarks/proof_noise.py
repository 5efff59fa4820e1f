"""Right plans and faults: does a proof fail for a right plan, and does it find every fault?

Models of torchvision and timm (retyped, small), and of transformers (unedited, tiny configs), under every axis. A right
plan is proved, or refused in words before it trains. Then every tensor that ranks compared is spoiled, one after the
other: one element, drawn by a seed, by ten times what is allowed there (1e-9 of the tensor's largest value, or the
multiple of its own noise). Each fault has to be found.

Writes `benchmarks/results/proof-noise.json`. A second start goes on with the cases that are not in it.

    python benchmarks/proof_noise.py [--only gpt2,unet] [--plans x,pipe] [--seconds 500]
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import harness
import torch
import transformers
from zoo import zoo

from weft.errors import LocalError, WeftError
from weft.plan import Branch, Context, Pipe, Plan, Shard, Tensor, Tile
from weft.proof.compare import Noise, Pairs
from weft.proof.prove import verify
from weft.proof.report import NOISE_MULTIPLE, TOLERANCE, severity

ROOT = Path(__file__).parents[1]
RESULTS = harness.RESULTS / "proof-noise.json"
sys.path.append(str(ROOT / "tests" / "helpers"))

from token_shapes_for_tests import SHAPES  # noqa: E402

OF_TRANSFORMERS = (
    *("gpt2", "gpt_neox", "bloom", "llama", "qwen2", "olmo2", "cohere", "gemma2", "mixtral", "qwen3_moe"),
    *("deepseek_v3", "mamba", "bert", "roberta", "distilbert", "albert", "modernbert", "t5", "bart"),
    *("vit", "dinov2", "swin", "convnext", "resnet", "mobilenet_v2", "segformer"),
)
MODELS: dict[str, tuple[Any, Any]] = {
    **SHAPES,
    **{f"transformers {one.name}": (one.build, one.batch) for one in zoo() if one.name in OF_TRANSFORMERS},
}
PLANS = {
    "data": Plan(data=2, statistics="batch"),
    "shard": Plan(shard=Shard(2, 3), statistics="batch", micro_batch=2),
    "x": Plan(tensor=Tensor(x=2)),
    "y": Plan(tensor=Tensor(y=2)),
    "z": Plan(tensor=Tensor(x=2), shard=Shard(2, 3), micro_batch=2, exact=False),  # the depth axis of 3-D matmuls
    "pipe": Plan(pipe=Pipe(2), micro_batch=2),
    "rows": Plan(tile=Tile(rows=2), micro_batch=4),
    "branch": Plan(branch=Branch(2), micro_batch=4),
    "context": Plan(context=Context(2), micro_batch=4),
    "expert": Plan(expert=2, micro_batch=2),
}
FAULTS = 10.0  # a fault is this many times what is allowed
SECONDS = 300.0
RANK, PROVE = importlib.import_module("weft.proof.rank"), importlib.import_module("weft.proof.prove")


def outcome_of(name: str, plan: str) -> dict[str, Any]:
    """Returns whether a plan was proved or refused, and why; and how many faults were tried and missed."""
    begin, answers = time.monotonic(), list[dict[str, Any]]()
    try:
        with _faults(f"{name} {plan}", answers):
            report = verify(*MODELS[name], PLANS[plan], timeout_seconds=SECONDS)
        failure = report.first_failure
        found: dict[str, Any] = {"outcome": "proved" if report.passed else "alarm"}
        if not report.passed:
            found["why"] = (
                report.not_proved[-1] if failure is None else f"{failure.what}: {failure.found}, {failure.where}"
            )
        found["faults"] = sum(answer["faults"] for answer in answers)
        found["missed"] = sorted({one for answer in answers for one in answer["missed"]})
        found["with_noise"] = sum(
            check.expected not in ("≤ 1e-09",) and "≤" in check.expected for check in report.checks
        )
    except LocalError as error:  # a rank failed, or did not end
        found = {"outcome": "alarm", "why": str(error)}
    except WeftError as error:
        is_foreseen = "runs unsplit and fails under" not in str(error)
        found = {"outcome": "refused" if is_foreseen else "alarm", "why": str(error)}
    return found | {"seconds": round(time.monotonic() - begin, 1)}


@contextmanager
def _faults(case: str, answers: list[dict[str, Any]]) -> Iterator[None]:
    """Ranks of proofs also spoil what they compare; `answers` gets their answers."""
    worst, run_rank, report_of = RANK._worst, RANK._run_rank, PROVE._report
    tried: dict[str, Any] = {"faults": 0, "missed": []}

    def spoil(quantity: str, pairs: Pairs, noise: Mapping[str, Noise], *others: Any) -> Any:
        count, missed = spoiled(quantity, pairs, noise.get(quantity, {}), case)
        tried["faults"] += count
        tried["missed"] += missed
        return worst(quantity, pairs, noise, *others)

    def run(*given: Any) -> dict[str, Any]:
        return run_rank(*given) | tried

    def keep(found: list[dict[str, Any]], trial: Any) -> Any:
        answers.extend(found)
        return report_of(found, trial)

    with mock.patch.multiple(RANK, _worst=spoil, _run_rank=run), mock.patch.object(PROVE, "_report", keep):
        yield


def spoiled(quantity: str, pairs: Pairs, noise: Noise, case: str) -> tuple[int, list[str]]:
    """Spoils one tensor after the other. Returns how many, and those of which no difference was found."""
    count, missed = 0, []
    for pair, _, scale in pairs.differences():
        if not pair.found.is_floating_point() or not pair.found.numel():
            continue
        allowed = max(TOLERANCE * scale, NOISE_MULTIPLE * noise.get(pair.name, 0.0))
        faulty = pair.found.clone(memory_format=torch.contiguous_format)
        faulty.view(-1)[zlib.crc32(f"{case} {pair.name}".encode()) % faulty.numel()] += FAULTS * allowed
        found = Pairs([pair._replace(found=faulty)], pairs.least).worst(noise)
        count += 1
        if not severity(found)[0]:
            missed.append(f"{quantity} {pair.name}")
    return count, missed


def main() -> None:
    parser = harness.options(__doc__)
    parser.add_argument("--only", help="names of models, with commas; also if they are there already")
    parser.add_argument("--plans", help="names of plans, with commas")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no further case begins")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    names = arguments.only.split(",") if arguments.only else list(MODELS)
    plans = arguments.plans.split(",") if arguments.plans else list(PLANS)
    rows: dict[str, dict[str, Any]] = json.loads(RESULTS.read_text())["models"] if RESULTS.exists() else {}
    end = time.monotonic() + arguments.seconds
    for name in names:
        for plan in plans:
            if plan in rows.get(name, {}) and not arguments.only:
                continue
            if time.monotonic() > end:
                return
            found = rows.setdefault(name, {})[plan] = outcome_of(name, plan)
            print(f"{name:24} {plan:8} {found}"[:230], flush=True)
            _write({name: rows[name] for name in MODELS if name in rows})


def _write(rows: Mapping[str, Mapping[str, Any]]) -> None:
    result = {
        "command": "python benchmarks/proof_noise.py",  # in slices, with options
        "number_of_models": len(rows),
        "plans": [_summary(plan, [row[plan] for row in rows.values() if plan in row]) for plan in PLANS],
        "models": rows,
    }
    harness.write(RESULTS, result, ("torch", "transformers"), "cpu")


def _summary(plan: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns how many models had each outcome under a plan, and how many faults were tried and missed."""
    return {
        "plan": plan,
        "proved": sum(one["outcome"] == "proved" for one in found),
        "refused before training": sum(one["outcome"] == "refused" for one in found),
        "failed though right": sum(one["outcome"] == "alarm" for one in found),
        "faults tried": sum(one.get("faults", 0) for one in found),
        "faults missed": sum(len(one.get("missed", [])) for one in found),
    }


if __name__ == "__main__":
    main()
