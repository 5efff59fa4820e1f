"""Published training tables as cases: a model, a cluster, how the software ran, the plan, and the seconds of a step.

A table is recognised by its header. What it does not say (micro-batch, interleaving, a grid) becomes several plans, of
which the model's own best is taken. Facts about the frameworks stand in weft/planner/frameworks.py, shapes of models in
published_models.py. TFLOP/s are turned into seconds by the convention that the table itself states.
"""

from __future__ import annotations

import csv
import itertools
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from published_case import Case, Row, ints, make_pipe, nodes, parts, rate
from published_experts import folding
from published_models import Model, named

from weft.cluster.hardware import load
from weft.errors import WeftError
from weft.plan import Context, Memory, Pipe, Plan, Recompute, Shard, Tensor
from weft.planner.frameworks import AXONN, CORE, FOUNDRY, MEGATRON, TITAN
from weft.profiling.software import COMPILED_LOSS_BYTES, EAGER_LOSS_BYTES


def read(path: Path) -> list[Case]:
    """The cases of a table in one of the known formats."""
    if not path.is_file():
        raise SystemExit(f"{path}: no such file")
    lines = path.read_text(encoding="utf-8-sig").splitlines()
    is_header = [any(name in line.split(",") for name in READERS) for line in lines]  # one may begin with "# GPUs"
    table = csv.DictReader(line for line, is_one in zip(lines, is_header, strict=True) if is_one or line[:1] != "#")
    header = list(table.fieldnames or [])
    reader = next((READERS[name] for name in READERS if name in header), None)
    if reader is None:  # llm-foundry's own files write "SeqLen (T)" and "# GPUs" for seqlen_t and gpus
        table.fieldnames = [re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_") for name in header]
        reader = next((READERS[name] for name in READERS if name in table.fieldnames), None)
    rows = list(table)
    if reader is None:
        formats = "; ".join(f"'{name}' ({READERS[name].__name__})" for name in READERS)
        raise SystemExit(
            f"{path}: no known table has these columns: {', '.join(header)}. A format has one of: {formats}"
        )
    cases = []
    for number, row in enumerate(rows, 1):
        try:
            cases += map(_checked, reader(row))
        except (KeyError, ValueError, TypeError, WeftError) as error:
            raise SystemExit(
                f"{path}, row {number}: {type(error).__name__} {error}; the format '{reader.__name__}' needs the "
                f"columns and names of its table in benchmarks/published"
            ) from error
    return cases


def _checked(case: Case) -> Case:
    if not (math.isfinite(case.seconds) and case.seconds > 0):
        raise ValueError(f"a step of {case.seconds} seconds")
    if not case.plans or min(count for _, count in case.plans) < 1:
        raise ValueError("no plan gives each rank of data a whole micro-batch of the batch, and each stage a layer")
    return case


def sc21(row: Row) -> Iterator[Case]:
    hidden, heads, layers, tensor, pipe, micro, devices, batch = ints(
        row, "hidden", "heads", "layers", "tp", "pp", "micro_batch", "num_gpus", "global_batch"
    )
    model = Model(hidden, heads, layers, 2048, 51200, dropout=True)
    data, each = parts(devices, tensor * pipe, "num_gpus"), row["layers_per_virtual_stage"]
    plan = Plan(
        data=data,
        pipe=make_pipe(pipe, layers // pipe // int(each) if each else 1),
        tensor=Tensor(tensor),
        micro_batch=micro,
        memory=Memory("full"),
        precision="bf16",
    )
    seconds = hardware_flops(model, batch) / devices / (rate(row["tflops_per_gpu"]) * 1e12)
    plans = ((plan, batch // (data * micro)),)
    yield Case("Megatron SC'21", row["model"], model, nodes("a100-80", devices), MEGATRON, plans, seconds)


def hardware_flops(model: Model, batch: int) -> float:
    """Of a step with full recompute, attention counted whole: Megatron's convention."""
    layers, hidden, sequence = model.layers, model.hidden, model.sequence
    whole = 1 + sequence / (6 * hidden) + model.vocabulary / (16 * layers * hidden)
    return 96 * batch * sequence * layers * hidden**2 * whole


def core(row: Row) -> Iterator[Case]:
    hidden, heads, layers, tensor, pipe, data, devices, batch = ints(
        row, "hidden", "heads", "layers", "tp", "pp", "dp", "num_gpus", "global_batch"
    )
    model = Model(hidden, heads, layers, 4096, 131072)
    flops = batch * 4096 * (72 * layers * hidden**2 * (1 + 4096 / (6 * hidden)) + 6 * model.vocabulary * hidden)
    seconds = flops / devices / (rate(row["tflops_per_gpu"]) * 1e12)
    plans = tuple(_core_plans(model, tensor, pipe, data, batch))
    yield Case("Megatron-Core H100", row["model"], model, nodes("h100", devices), CORE, plans, seconds)


def _core_plans(model: Model, tensor: int, pipe: int, data: int, batch: int) -> Iterator[tuple[Plan, int]]:
    """Micro-batch and interleaving are not printed: those whose activations fit in half of the memory."""
    for micro in (1, 2, 4):
        count = batch // (data * micro)
        saved = 34 * model.sequence * micro * model.hidden / tensor * model.layers / pipe * min(pipe, count)
        chunks = [n for n in range(1, model.layers // pipe + 1) if model.layers % (pipe * n) == 0] if pipe > 1 else [1]
        for each in chunks if saved < 60e9 else ():
            if each == 1 or count % pipe == 0:
                tensors = Tensor(tensor, sequence=tensor > 1)
                plan = Plan(data=data, pipe=make_pipe(pipe, each), tensor=tensors, micro_batch=micro, precision="bf16")
                yield plan, count


def tensor_scaling(row: Row) -> Iterator[Case]:
    hidden, heads, layers, tensor, devices, batch = ints(row, "hidden", "heads", "layers", "tp", "num_gpus", "batch")
    name, data = "a100-80" if "A100" in row["gpu"] else "v100-32", parts(devices, tensor, "num_gpus")
    plan = Plan(data=data, tensor=Tensor(tensor), micro_batch=batch // data, precision="bf16", memory=Memory("full"))
    model = Model(hidden, heads, layers, 1024, 51200, dropout=True)
    label, table = f"{row['case']} on {devices}", f"Megatron 2020 {name[:4].upper()}"
    # Its README then (not re-checked): torch's DDP, which overlaps, serves the larger models best, its own the small.
    software, seconds = replace(MEGATRON, hides_gradients=tensor >= 4), float(row["iter_ms"]) / 1e3
    yield Case(table, label, model, nodes(name, devices), software, ((plan, 1),), seconds)


_ACTIVATIONS = ("act_gib_no_recompute_tp", "act_gib_seqpar_selective")


def korthikanti(row: Row) -> Iterator[Case]:
    hidden, heads, layers, tensor, pipe, micro, batch, chunks = ints(
        row, "hidden", "heads", "layers", "tp", "pp", "micro_batch", "global_batch", "interleave"
    )
    model = Model(hidden, heads, layers, 2048, 51200, dropout=True)
    # Activations are given without recompute, and with both; with full recompute in percent of the former.
    state, none, both = (float(row[c]) for c in ("params_opt_gib_per_gpu", *_ACTIVATIONS))
    held = {"full": state + none * float(row["act_pct_full"]) / 100, "selective": state + both}
    for column, recompute in (("iter_s_full_recompute", "full"), ("iter_s_seqpar_selective", "selective")):
        plan = Plan(
            pipe=make_pipe(pipe, chunks),
            tensor=Tensor(tensor, sequence=recompute == "selective"),
            micro_batch=micro,
            precision="bf16",
            memory=Memory("full" if recompute == "full" else "selective"),
        )
        where, label = nodes("a100-80", int(row["gpus"])), f"{row['model']} {recompute}"
        plans, group = ((plan, batch // micro),), (row["model"],)
        seconds = float(row[column])
        yield Case("Korthikanti", label, model, where, MEGATRON, plans, seconds, group, held[recompute])


SHAPES = {
    "125m": (768, 12, 12),
    "350m": (1024, 16, 24),
    "760m": (1536, 12, 24),
    "1b": (2048, 16, 24),
    "3b": (2560, 20, 32),
    "7b": (4096, 32, 32),
    "13b": (5120, 40, 40),
    "30b": (7168, 56, 48),
    "70b": (8192, 64, 80),
}
FOUNDRY_NODES = {"a100_40gb": "a100-40", "a100_80gb": "a100-80", "h100_80gb": "h100"}


def foundry(row: Row) -> Iterator[Case]:
    if row["activation_cpuoffload"] == "True":
        return
    sequence, devices, micro, count, batch = ints(
        row, "seqlen_t", "gpus", "microbatchsize", "gradaccum", "globalbatchsize"
    )
    is_fp8, name = "fp8" in row["precision"], FOUNDRY_NODES[row["gpu"]]
    is_older = row["mp_mode"] == "PURE"
    software = replace(
        FOUNDRY,
        fp8="tensor" if is_fp8 else "",
        gradient_bytes=2 if is_older else 4,
        stops_early=not is_older,
    )
    plan = Plan(
        shard=Shard(devices, 3 if row["sharding_strategy"] == "FULL_SHARD" else 2),
        micro_batch=micro,
        precision="bf16",
        memory=Memory("full" if row["activation_checkpointing"] == "True" else "none", accumulate="slice"),
    )
    label = f"{row['model']} {sequence} on {devices}, {micro} × {count}, {plan.memory.recompute}"
    table, model = f"Mosaic {name}{' fp8' if is_fp8 else ''}", Model(*SHAPES[row["model"]], sequence, 50368)
    seconds = batch * sequence / rate(row["throughput_t_s"])
    group = (row["model"], sequence, devices, batch)
    yield Case(table, label, model, nodes(name, devices), software, ((plan, count),), seconds, group)


# By how a GPU's name begins in a table of torchtitan's format.
TITAN_NODES = {"H200": "h200", "H100-96GB-HBM2e-500W": "h100-500w", "H100": "h100", "A100": "a100-80"}


def titan(row: Row) -> Iterator[Case]:
    """Also FSDP runs of other trainers on torch's own parallelism. Columns that torchtitan's table does not have:
    `grad_accum` micro-batches of a step, `gpus_per_node`, `node_gbit_per_s` of all NICs, `grad_bytes`,
    and `source`.
    """
    words = row["parallelism"].split()
    degrees = dict.fromkeys(("FSDP", "TP", "PP", "CP", "DP"), 1)
    for word, name in itertools.product(words, degrees):
        if word.startswith(name) and word[len(name) :].isdigit():
            degrees[name] = int(word[len(name) :])
    shard, tensor, pipe, context, data = degrees.values()
    sequence, local = ints(row, "seq_len", "local_batch")
    is_compiled, is_async = "compile" in row["techniques"], "asyncTP" in words
    precision = " ".join(row["techniques"].replace("compile", "").replace("eager", "").split())
    software = replace(
        TITAN,
        fused=is_compiled,
        loss_bytes=COMPILED_LOSS_BYTES if is_compiled else EAGER_LOSS_BYTES,
        hides_tensor=is_async,
        fp8="row" if "rowwise" in precision else "tensor" if "fp8" in precision else "",
        gradient_bytes=int(row.get("grad_bytes") or TITAN.gradient_bytes),
    )
    # As many micro-batches as stages: not printed, but the ratio of the 1F1B row to the interleaved one says so.
    count = int(row.get("grad_accum") or pipe)
    is_interleaved = "interleaved1F1B" in words
    plan = Plan(
        data=data,
        shard=Shard(shard, 3 if pipe == 1 else 2),  # with a pipeline, parameters stay gathered
        pipe=make_pipe(pipe, 2 if is_interleaved else 1),
        tensor=Tensor(tensor, sequence=tensor > 1),
        context=Context(context),
        micro_batch=max(1, local // count),
        precision="bf16",
        memory=Memory(_titan_recompute(row["activation_ckpt"])),
    )
    devices, each = ints(row, "num_gpus")[0], row.get("gpus_per_node")
    seconds = local * sequence * shard * data / devices / rate(row["tokens_per_s_per_gpu"])
    label = f"{row['model']} {row['parallelism']} {sequence} {row['techniques']}"
    memory = float(row["memory_gib"]) if row["memory_gib"] else None
    model, plans = named(row["model"], sequence), ((plan, count),)
    table, where = f"{row.get('source') or 'torchtitan'} {precision}", nodes(_titan_node(row["gpu"]), devices, each)
    group = (row["model"], devices, sequence, local * shard * data, row["techniques"], row["source_file"])
    compiled_loss = is_compiled and "202412" not in row["source_file"]  # then a TODO in its source
    wire = float(row["node_gbit_per_s"]) * 1e9 / 8 if row.get("node_gbit_per_s") else None
    yield Case(table, label, model, where, software, plans, seconds, group, memory, compiled_loss, wire)


def _titan_recompute(text: str) -> Recompute:
    """By how its words begin; all other ways are selective."""
    return "full" if text.startswith("full") else "none" if text.startswith("no") else "selective"


def _titan_node(gpu: str) -> str:
    name = next((name for start, name in TITAN_NODES.items() if gpu.startswith(start)), None)
    if name is None:
        raise ValueError(f"gpu '{gpu}' begins with none of {', '.join(TITAN_NODES)}")
    return name


def llama_fp8(row: Row) -> Iterator[Case]:
    """Also other tables of Megatron-Core and NeMo on H100. Columns that this one does not have: `precision` (fp8 where
    none is given), `layers` where they are not the model's, `source`.
    """
    devices, batch, micro, sequence, tensor, pipe, context, chunks = ints(
        row, "num_gpus", "gbs", "mbs", "seq_len", "tp", "pp", "cp", "vp"
    )
    data = parts(devices, tensor * pipe * context, "num_gpus")
    tensors = Tensor(tensor, sequence=tensor > 1)
    plan = Plan(
        data=data,
        pipe=make_pipe(pipe, chunks),
        tensor=tensors,
        context=Context(context),
        micro_batch=micro,
        precision="bf16",
    )
    precision = row.get("precision") or "fp8"
    software = replace(CORE, fp8="tensor" if precision == "fp8" else "", attention="flash3", many_tiles=True)
    model = named(row["model"], sequence, int(row.get("layers") or 0))
    seconds = batch * sequence / devices / rate(row["tokens_per_s_per_gpu"])
    plans, table = ((plan, parts(batch, data * micro, "gbs")),), f"{row.get('source') or 'Megatron Llama'} {precision}"
    label = f"{row['model']} on {devices}" if row.get("source") else row["model"]
    yield Case(table, label, model, nodes("h100", devices), software, plans, seconds)


def vtrain(row: Row) -> Iterator[Case]:
    devices, batch, micro, hidden, heads, layers, sequence, tensor, data, pipe = ints(
        row,
        *("# GPUs", "global batch", "micro batch", "hidden size", "attention heads", "# layers", "sequence length"),
        *("tensor parallelism", "data parallelism", "pipeline parallelism"),
    )
    plan = Plan(
        data=data, pipe=Pipe(pipe), tensor=Tensor(tensor), micro_batch=micro, precision="bf16", memory=Memory("full")
    )
    label = f"{devices} GPUs batch {batch}: {layers} × {hidden}, tensor {tensor} data {data} pipe {pipe} micro {micro}"
    # A vocabulary of 50,257 that nothing pads, and ranks of tensor without the rest (its src/config.py, src/model).
    model = Model(hidden, heads, layers, sequence, 50257 // tensor * tensor, dropout=True)
    seconds, group = float(row["iteration time (ms)"]) / 1e3, (devices, batch, hidden, layers)
    plans = ((plan, batch // (data * micro)),)
    # Its gradients are 16 bits: rows that differ in data only differ by what vTrain's table of all-reduces has for 2
    # bytes a parameter, to the nanosecond (its src/predictor.py). Four NICs of 200 Gb/s a node: its own configuration.
    where, wire = nodes("a100-80", devices), 100e9
    yield Case("vTrain A100", label, model, where, MEGATRON, plans, seconds, group, node_bytes_per_second=wire)


# AxoNN tries the transpositions of each product: 125 of a GCD's 191.5 TFLOP/s (arXiv 2502.08145, not re-checked).
AXONN_CALIBRATION = {"frontier": 0.65}
AXONN_RUNS = {  # (machine, layers, hidden, heads), by devices
    4096: ("perlmutter", 38, 9216, 72),
    32768: ("frontier", 96, 16384, 128),
    6144: ("alps", 56, 9216, 72),
    1024: ("perlmutter", 42, 12288, 96),
}


def axonn(row: Row) -> Iterator[Case]:
    devices = int(row["gpus"])
    machine, layers, hidden, heads = AXONN_RUNS[devices]
    model, batch = Model(hidden, heads, layers, 2048, 51200), 8192  # 16.8 M tokens
    seconds = hardware_flops(model, batch) / (rate(row["aggregate"].split()[0]) * 1e15)
    plans = tuple(_grids(model, devices, batch, load(machine).node.device.memory_bytes))
    where, reached = nodes(machine, devices), AXONN_CALIBRATION.get(machine)
    yield Case("AxoNN", f"{machine} {devices}", model, where, AXONN, plans, seconds, calibration=reached)


def _grids(model: Model, devices: int, batch: int, memory_bytes: int) -> Iterator[tuple[Plan, int]]:
    """Grids are not published: those that divide the model and fit. On Alps (3 × 2048) batches are rounded up."""
    sizes = [2**power for power in range(16)]
    for x, y, shard in itertools.product(sizes[:8], sizes[:6], sizes[:12]):
        data, rest = divmod(devices, x * y * shard)
        if rest or model.heads % x or batch // (data * shard) < 1:
            continue
        state = 16 * model.numel / (x * y * shard) + 4 * model.numel / (x * y) / model.layers
        for count in sizes[:6]:  # the fewest micro-batches that fit
            local = batch / (data * shard) / count
            kept = 2 * model.sequence * local * model.hidden * (model.layers / y + 17 / x)
            logits = 6 * model.sequence * local * model.vocabulary / x
            if local >= 1 and state + kept + logits < 0.85 * memory_bytes:
                plan = Plan(
                    data=data,
                    shard=Shard(shard),
                    tensor=Tensor(x, y),
                    micro_batch=math.ceil(local),
                    precision="bf16",
                    memory=Memory("full"),
                )
                yield plan, count
                break


READERS: dict[str, Callable[[Row], Iterator[Case]]] = {
    "layers_per_virtual_stage": sc21,
    "mfu_pct": core,
    "etp": folding,
    "case": tensor_scaling,
    "iter_s_full_recompute": korthikanti,
    "sharding_strategy": foundry,
    "techniques": titan,
    "grad_accum": llama_fp8,
    "iteration time (ms)": vtrain,
    "aggregate": axonn,
}
