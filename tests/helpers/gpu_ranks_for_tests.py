"""What tests of ranks that share a GPU run in children: sums over symmetric memory, and weights in host memory.

MPS lets the ranks' kernels run at the same time, which those that wait for each other need to be fast.
"""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Any

import torch

SECONDS = 120.0
SIZES = (2, 6, 64, 1000, 4096, 131072)  # numbers of a sum
TIMED_BYTES = (8 << 10, 64 << 10, 512 << 10)
NUM_TIMED = 20


def _with_mps(job: Any, num_ranks: int) -> list[Any]:
    """Run a job on ranks that share the GPU."""
    from weft.launch.local_ranks import run_local
    from weft.launch.mps import shared_gpu_service

    os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
    with shared_gpu_service(os.environ, print) as variables:
        os.environ.update(variables)
        return run_local(job, num_ranks, SECONDS, "cuda")


def symmetric_sums(num_ranks: int) -> list[Any]:
    """On each rank: sums that differ from those of one_shot, sums that other calls changed, and times of sums."""

    def rank(index: int) -> Any:
        from weft.cluster.small_choice import SYMMETRIC
        from weft.comm.small_measure import measured_choice
        from weft.comm.small_sums import with_symmetric_memory
        from weft.mesh import Mesh
        from weft.plan import Plan, Tensor

        device = torch.device("cuda", torch.cuda.current_device())
        mesh = Mesh(Plan(tensor=Tensor(num_ranks)), device)
        axis, reason = with_symmetric_memory(mesh["x"], device)
        if reason is not None:
            return {"reason": reason}
        wrong = [
            [strategy, number, str(dtype)]
            for strategy in SYMMETRIC
            for dtype in (torch.float32, torch.bfloat16)
            for number in SIZES
            if not _is_one_shot(axis, strategy, number, dtype, device)
        ]
        mesh.ledger.clear()
        _summed(torch.ones(64, device=device), axis, "symmetric_one_shot")
        counted = {f"{key[0]} {key[1]}": dict(one.sizes) for key, one in mesh.ledger.entries().items()}
        return {
            "wrong": wrong,
            "in a row": _wrong_in_a_row(axis, device),
            "graph": _in_a_graph(axis, device),
            "counted": counted,
            "table": list(measured_choice(axis, device, (8192, 65536)).strategies),
            "microseconds": {size: _times(axis, device, size) for size in TIMED_BYTES},
        }

    return _with_mps(rank, num_ranks)


def _summed(tensor: torch.Tensor, axis: Any, strategy: Any) -> torch.Tensor:
    from weft.cluster.small_choice import SmallChoice
    from weft.comm import all_reduce

    all_reduce(tensor, replace(axis, small=SmallChoice.always(strategy))).wait()
    return tensor


def _is_one_shot(axis: Any, strategy: Any, number: int, dtype: torch.dtype, device: torch.device) -> bool:
    generator = torch.Generator().manual_seed(100 * axis.index + number)
    given = torch.randn(number, generator=generator).to(device, dtype)
    found, twin = (_summed(given.clone(), axis, one) for one in (strategy, "one_shot"))
    return torch.equal(found, twin) and not torch.equal(found, given)


def _wrong_in_a_row(axis: Any, device: torch.device) -> int:
    """Sums of one call after another that are not theirs, of both strategies and different sizes."""
    wrong = torch.zeros((), device=device, dtype=torch.int64)
    for number in range(1000):
        strategy = "symmetric_two_shot" if number % 3 == 0 else "symmetric_one_shot"
        tensor = torch.full((4 + 4 * (number % 50),), float((axis.index + 2) * (number % 13)), device=device)
        expected = float(sum((one + 2) * (number % 13) for one in range(axis.degree)))
        wrong += (_summed(tensor, axis, strategy) != expected).sum()
    return int(wrong)


def _in_a_graph(axis: Any, device: torch.device) -> bool:
    """Are sums in a CUDA graph those of new values?"""
    tensor = torch.ones(256, device=device)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _summed(tensor, axis, "symmetric_one_shot")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _summed(tensor, axis, "symmetric_one_shot")
        _summed(tensor, axis, "symmetric_two_shot")
    tensor.fill_(3.0)
    graph.replay()
    torch.cuda.synchronize()
    return bool((tensor == 3.0 * axis.degree**2).all())


def _times(axis: Any, device: torch.device, size: int) -> dict[str, float]:
    """Microseconds of a sum in a row of some, by strategy."""
    from weft.cluster.small_choice import STRATEGIES

    found = {}
    for strategy in STRATEGIES:
        tensor = torch.zeros(size // 2, device=device, dtype=torch.bfloat16)
        for _ in range(3):
            _summed(tensor, axis, strategy)
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(NUM_TIMED):
            _summed(tensor, axis, strategy)
        torch.cuda.synchronize()
        found[strategy] = round((time.perf_counter() - begin) / NUM_TIMED * 1e6, 1)
    return found


def served_on_ranks(
    table: dict[str, Any],
    ways: list[list[Any]],
    device: str = "cuda",
    cache: str | None = None,
    dtype: str = "float32",
) -> list[Any]:
    """Serve a small model on ranks of a plan, for each (blocks copied ahead, sums). What each rank found: the answers
    on the first, calls of gathers of weights by bytes, and what was said. `cache`: loki.
    """
    from weft.plan import Plan
    from weft.schema import build_dataclass

    plan = build_dataclass(Plan, table, "plan")

    def rank(index: int) -> Any:
        form, kind = _chosen_tokens(cache), getattr(torch, dtype)
        return [_served(plan, ahead, sums, torch.device(device), form, kind) for ahead, sums in ways]

    if device == "cuda":
        return _with_mps(rank, plan.num_ranks)
    from weft.launch.local_ranks import run_local

    return run_local(rank, plan.num_ranks, SECONDS)


def _chosen_tokens(cache: str | None) -> Any:
    """A format of the cache by which decodes choose tokens, with the same axes in every process."""
    from weft.serve.attention.choice import LokiChoice
    from weft.serve.attention.formats import CacheFormat, Loki

    generator = torch.Generator().manual_seed(0)
    axes = torch.linalg.qr(torch.randn(5, 2, 64, 64, generator=generator, dtype=torch.float64))[0]
    return None if cache is None else CacheFormat(loki=Loki(axes, LokiChoice(0.5, 0.3, newest=2, dense_below=4)))


def _served(plan: Any, ahead: int, sums: Any, device: torch.device, form: Any, dtype: torch.dtype) -> Any:
    from parallel_serving_for_tests import tokens_on_ranks
    from serving_for_tests import CONFIGS, GREEDY

    from weft.mesh import Mesh
    from weft.models import DecoderConfig
    from weft.serve.attention.formats import block_size_of
    from weft.serve.engine import EngineOptions
    from weft.serve.model.ranks import ServingRanks
    from weft.serve.scheduling.request import Request

    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    CONFIGS["wide"] = DecoderConfig(
        "llama", vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=5, **heads
    )  # type: ignore[arg-type]
    requests = [Request(str(i), tuple((7 * i + j * j) % 61 for j in range(1 + 9 * i)), 12, GREEDY) for i in range(5)]
    size = 16 if form is None else block_size_of(form)
    sizes = {"block_size": size, "num_blocks": 64, "max_running": 4, "stream_weights": ahead}
    options = EngineOptions(**sizes, dtype=dtype, device=device, cache=form)  # type: ignore[arg-type]
    mesh, said = Mesh(plan, device), list[str]()
    ranks = ServingRanks(mesh, sums, ahead > 0, said.append)
    found = tokens_on_ranks("wide", mesh, requests, options, ranks=ranks)
    gathers = mesh.ledger.entries().get(("data", "all_gather"))
    return found, None if gathers is None else {int(size): calls for size, calls in gathers.sizes.items()}, said


def split_logits(architecture: str, device: str = "cuda", dtype: str = "bfloat16") -> list[Any]:
    """On each of two ranks of `context`: the largest errors of logits of chunks and decodes against float32, of both
    ranks together, of one rank that has all pages, and of two whose second rank's results are dropped.
    """
    from parallel_serving_for_tests import logits_of_long
    from serving_for_tests import CONFIGS

    from weft.mesh import Mesh
    from weft.models import DecoderConfig
    from weft.plan import Context, Plan
    from weft.serve.attention.plain import PlainPages
    from weft.serve.model.ranks import ServingRanks

    def rank(index: int) -> Any:
        sizes = {"num_attention_heads": 8, "num_key_value_heads": 2, "max_position_embeddings": 512}
        window = {"sliding_window": 70} if architecture == "mistral" else {}
        CONFIGS["long"] = DecoderConfig(
            architecture, vocab_size=64, hidden_size=256, intermediate_size=384, num_hidden_layers=2, **sizes, **window
        )  # type: ignore[arg-type]
        place, given = torch.device(device), getattr(torch, dtype)
        exact, alone = (logits_of_long("long", one, place, None) for one in (torch.float32, given))
        ranks = ServingRanks(Mesh(Plan(context=Context(2)), place))
        together = logits_of_long("long", given, place, ranks)
        whole = PlainPages.attend

        def dropped(*given: Any) -> torch.Tensor:
            part = whole(*given)
            if index == 1:
                part[..., -1] = -torch.inf
            return part

        PlainPages.attend = dropped  # type: ignore[method-assign]
        wrong = logits_of_long("long", given, place, ranks)
        errors = [float((one - exact).abs().max()) for one in (together, alone, wrong)]
        return [*errors, float(exact.abs().max()), together.tolist()]

    if device == "cuda":
        return _with_mps(rank, 2)
    from weft.launch.local_ranks import run_local

    return run_local(rank, 2, SECONDS)


JOBS = {"symmetric_sums": symmetric_sums, "served_on_ranks": served_on_ranks, "split_logits": split_logits}
