"""An answer of `weft plan` with realistic numbers, as its JSON has it, to make pages of."""

from __future__ import annotations

from typing import Any

from weft.schedule import Action, make_schedule, simulate


def make_timeline(name: str, num_ranks: int, num_micro_batches: int, seconds: float, **options: int) -> dict[str, Any]:
    """A simulated schedule as `weft plan --json` prints it."""
    timeline = simulate(make_schedule(name, num_ranks, num_micro_batches, **options), 1, 1.2, 0.8, 0.05)
    scale = seconds / timeline.makespan_seconds

    def told(span: Any) -> dict[str, Any]:
        at = {"start": span.start_seconds * scale, "end": span.end_seconds * scale}
        if not isinstance(span.action, Action):
            return {**at, "kind": "wait"}
        action = span.action
        return {**at, "kind": action.kind, "stage": action.stage, "micro_batch": action.micro_batch}

    ranks = [[told(span) for span in spans] for spans in timeline.spans]
    return {"num_ranks": num_ranks, "makespan_seconds": seconds, "ranks": ranks}


def make_plan(axes: str, seconds: float, activations: float = 22.4e9, **other: Any) -> dict[str, Any]:
    memory = {
        "parameters": 13.2e9,
        "gradients": 13.2e9,
        "optimizer": 9.9e9,
        "activations": activations,
        "other": 3.1e9,
    }
    parts = {"compute": 0.72, "x": 0.11, "data": 0.03, "pipe": 0.01, "bubble": 0.1, "optimizer": 0.03}
    return {
        "plan": {"data": 10},
        "axes": axes,
        "num_devices": 5120,
        "micro_batch": 1,
        "num_micro_batches": 48,
        "recompute": "selective",
        "seconds": seconds,
        "tokens_per_second": 3932160 / seconds,
        "device_hours_per_billion_tokens": 5120 * seconds / 3600 * 1e9 / 3932160,
        "mfu": 6.2 / seconds,
        "where": {name: share * seconds for name, share in parts.items()},
        "memory": memory,
        "memory_bytes": sum(memory.values()),
        "bubble_share": 0.1,
        "traffic": [],
        "timeline": None,
        **other,
    }


CLUSTER = {
    "name": "a100-80:640x8",
    "nodes": 640,
    "devices": 5120,
    "devices_per_node": 8,
    "device": "A100-80",
    "memory_limit_bytes": 80e9,
    "intra_bytes_per_second": 300e9,
    "inter_bytes_per_second": 200e9,
}
QUESTION = {
    "asked": "1,920 sequences of 2,048 tokens",
    "unit": "tokens",
    "batch": 1920,
    "tokens_per_step": 3932160,
    "precision": "bf16",
    "objective": "time",
    "constraints": ["pipe>=4", "tensor.x<=8"],
}


def make_answer(**other: Any) -> dict[str, Any]:
    """What `weft plan` says of a 530B model on 5,120 devices; `other` replaces parts of it."""
    shapes = [(16, 8, 40, 11.92), (20, 8, 32, 12.05), (8, 8, 80, 12.31), (40, 4, 32, 12.8), (32, 8, 20, 13.36)]
    names = [f"data {data} × pipe {pipe} (1f1b) × x {x} (sequence)" for pipe, x, data, _ in shapes]
    plans = [
        make_plan(name, seconds, 22.4e9 - 2e9 * index, num_micro_batches=1920 // data)
        for index, (name, (_, _, data, seconds)) in enumerate(zip(names, shapes, strict=True))
    ]
    link = [("x", "all_gather", 3264, 0.38e12, "intra"), ("x", "reduce_scatter", 3264, 0.37e12, "intra")]
    link += [("pipe", "send", 96, 1.6e9, "inter"), ("data", "reduce_scatter", 7, 8.1e9, "inter")]
    link += [("data", "all_reduce", 1, 4, "inter"), ("data", "all_gather", 7, 8.1e9, "inter")]
    plans[0]["traffic"] = [dict(zip(("axis", "operation", "calls", "bytes", "link"), one, strict=True)) for one in link]
    plans[0]["timeline"] = make_timeline("1f1b", 16, 24, 11.4)
    too_large = make_plan("data 80 × pipe 8 (1f1b) × x 8 (sequence)", 11.2, 61e9)
    far_too_large = make_plan("data 320 × shard 2 (stage 1) × pipe 4 (zero-bubble) × x 2", 10.4, 158e9)
    answer = {
        "model": {"name": "gpt-530b", "parameters": 529_600_000_000, "blocks": 105},
        "cluster": dict(CLUSTER),
        "question": dict(QUESTION),
        "considered": 12345,
        "search_seconds": 3.2,
        "plans": plans,
        "why": "Its bubble is 4 points smaller than with pipe = 32, and x stays inside a node. "
        "The next plan saves 2 GB but waits 1.1 s longer for its gradients.",
        "rejected": [
            {
                **too_large,
                "reason": "does not fit: 100.4 of 80 GB, activations 61 GB",
                "remedy": "recompute = full would fit",
            },
            {**far_too_large, "reason": "does not fit: 197.4 of 80 GB, activations 158 GB", "remedy": None},
        ],
        "sensitivities": [
            {"change": "+1 GB/s between nodes", "seconds": 11.918, "saved_seconds": 0.002, "axes": names[0]},
            {"change": "+1 GB of memory", "seconds": 11.92, "saved_seconds": 0.0, "axes": names[0]},
            {"change": "+1 node", "seconds": 11.9, "saved_seconds": 0.02, "axes": names[1]},
        ],
        "scaling": [
            {"devices": 320, "nodes": 40, "axes": None, "mfu": None, "fits": False},
            *(
                {"devices": n, "nodes": n // 8, "axes": names[0], "seconds": 3932160 / rate, "tokens_per_second": rate}
                | {"mfu": mfu, "fits": True}
                for n, rate, mfu in zip(
                    (640, 1280, 2560, 5120, 10240),
                    (45.9e3, 90.4e3, 174.4e3, 329.9e3, 569e3),
                    (0.58, 0.571, 0.55, 0.52, 0.449),
                    strict=True,
                )
            ),
        ],
    }
    return {**answer, **other}
