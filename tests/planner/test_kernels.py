"""Times of kernels: tiles and waves by hand, the roofline's limits, attention, fp8, context,
and the pace of the host; lists run as simulated."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from weft.cluster.hardware import Device, load, ring_seconds
from weft.inspection.memory_traffic import MemoryTraffic
from weft.parallel.context.attention import all_to_all_traffic, ring_traffic
from weft.plan import AXES, Context, Memory, Pipe, Plan, Precision, Shard, Tensor
from weft.planner.closed_form_memory import spared_bytes
from weft.planner.kernels import (
    CAST_BYTES,
    FILL_DEPTH,
    FLASH,
    FP8_PRODUCT,
    LAUNCH_SECONDS,
    MEMORY_SHARE,
    TURN_BYTES,
    Kernels,
    tile_share,
)
from weft.planner.micro_batch import HOST_BACKWARD, LOSS_OPERATION_BYTES, place
from weft.planner.overlap import OVERLAP_LOSS, beside
from weft.planner.schedule_time import least_makespan, least_with_any_stages, run
from weft.planner.step import FIXED_SECONDS, StepModel
from weft.profiling.software import EAGER_LOSS_BYTES, Software, software_for_text
from weft.profiling.workload import BlockWork, Call, Product, Workload
from weft.schedule.schedules import make_schedule
from weft.schedule.simulate import simulate

A100 = load("a100-80").node.device
H100 = load("h100").node.device


def kernels(device: Device = A100, **facts: object) -> Kernels:
    return Kernels(device, Software(**facts), "bf16")  # type: ignore[arg-type]


def test_one_full_wave_of_the_largest_tile() -> None:
    # 12 × 9 tiles of 128 × 256 on 108 processors: nothing is lost but the pipeline's fill.
    assert tile_share(12 * 128, 4096, 9 * 256, 108) == pytest.approx(4096 / (4096 + FILL_DEPTH))


def test_one_tile_more_costs_a_wave() -> None:
    # With one row more a 13th row of tiles starts a second wave, which smaller tiles soften.
    full, over = tile_share(12 * 128, 4096, 9 * 256, 108), tile_share(12 * 128 + 1, 4096, 9 * 256, 108)
    assert over < 0.8 * full


def test_without_processors_only_whole_tiles_count() -> None:
    whole, ragged = tile_share(1280, 960, 2560, None), tile_share(1281, 960, 2560, None)
    assert ragged < whole
    assert tile_share(1, 960, 1, None) < 1e-3


@given(st.integers(1, 4000), st.integers(1, 4000), st.integers(1, 4000), st.sampled_from((None, 80, 108, 132)))
def test_a_share_is_a_share(rows: int, inner: int, columns: int, num_processors: int | None) -> None:
    assert 0 < tile_share(rows, inner, columns, num_processors) < 1


@given(st.integers(1, 64), st.integers(1, 64), st.integers(1, 64), st.integers(2, 4))
def test_more_work_never_takes_less_time(rows: int, inner: int, columns: int, times: int) -> None:
    one = kernels()
    rows, inner, columns = 128 * rows, 128 * inner, 128 * columns
    base = one.product(rows, inner, columns)
    assert one.product(rows, inner * times, columns) >= base
    assert one.product(rows * times, inner, columns) >= 0.999 * base
    assert one.product(rows, inner, columns * times) >= 0.999 * base


@given(st.integers(1, 100_000), st.integers(1, 20_000), st.integers(1, 20_000))
def test_no_matmul_beats_the_roofline(rows: int, inner: int, columns: int) -> None:
    seconds = kernels().product(rows, inner, columns)
    assert A100.memory_bandwidth_bytes_per_second is not None
    assert seconds > 2 * rows * inner * columns / (312e12 * A100.calibration)
    assert seconds > 2 * (rows * inner + inner * columns) / A100.memory_bandwidth_bytes_per_second


def test_a_thin_matmul_runs_at_the_speed_of_memory() -> None:
    num_bytes = 2 * (8 + 8 * 65536 + 65536)
    assert kernels().product(1, 8, 65536) == pytest.approx(
        max(num_bytes / (2.039e12 * MEMORY_SHARE), 0) + LAUNCH_SECONDS, rel=0.5
    )


def test_a_large_matmul_of_the_h200_as_measured() -> None:
    # 8192 × 8192 × 8192 in 1.62 ms and 4096 × 896 × 7168 in 88 us, on random data (torch 2.11, CUDA 13).
    one = kernels(load("h200").node.device)
    assert one.product(8192, 8192, 8192) == pytest.approx(1620.9e-6, rel=0.05)
    assert one.product(4096, 896, 7168) == pytest.approx(88.4e-6, rel=0.08)


@pytest.mark.parametrize(
    ("rows", "hidden", "columns", "forward_us", "backward_us"),
    [
        (4096, 2048, 50264, 1229, 1198 + 1210),
        (4096, 2048, 50260, 3040, 3412 + 3095),
        (4096, 2048, 50258, 3014, 3420 + 3093),
        (4096, 2048, 50257, 8546, 6028 + 5788),
        (8192, 4096, 50257, 30808, 23997 + 22731),
        (1024, 2048, 12564, 210, 220 + 217),
        (1024, 2048, 12565, 552, 416 + 334),
    ],
)
def test_rows_that_are_no_multiple_of_16_bytes_as_measured_on_the_h200(
    rows: int, hidden: int, columns: int, forward_us: float, backward_us: float
) -> None:
    one = kernels(load("h200").node.device)
    assert 1e6 * sum(one.linear(rows, hidden, columns)) == pytest.approx(forward_us + backward_us, rel=0.15)


def test_only_rows_in_memory_must_be_aligned() -> None:
    one = kernels(load("h200").node.device)
    assert sum(one.linear(4095, 4096, 4096)) == pytest.approx(sum(one.linear(4096, 4096, 4096)), rel=0.01)
    assert sum(one.linear(4096, 4095, 4096)) > 4 * sum(one.linear(4096, 4096, 4096))
    assert sum(kernels().linear(4096, 4096, 50260)) == pytest.approx(sum(kernels().linear(4096, 4096, 50264)), rel=0.01)
    assert sum(kernels().linear(4096, 4096, 50257)) > 2 * sum(kernels().linear(4096, 4096, 50264))


def test_attention_by_hand() -> None:
    sequence, flops = 1_000_000_000, 1e15  # so long that nothing is lost to the diagonal
    forward, backward = kernels(attention="flash2").attention(flops, 0, sequence)
    shares = FLASH["flash2"][0]
    assert forward == pytest.approx(flops / 2 / (312e12 * shares[0]), rel=1e-5)
    assert backward == pytest.approx(2.5 * flops / 2 / (312e12 * shares[1]), rel=1e-5)
    whole = kernels(attention="flash2").attention(flops, 0, sequence, is_causal=False)
    assert whole[0] == pytest.approx(2 * forward)
    assert kernels().attention(0, 0, 0) == (0.0, 0.0)


def test_flash_attention_on_the_h200_as_measured() -> None:
    one = kernels(load("h200").node.device, attention="flash2")
    flops = 2 * 2 * 8 * 16 * 2048 * 2048 * 128  # batch 8, 16 heads of 128, counted whole
    forward, backward = one.attention(flops, 0, 2048)
    assert flops / 2 / forward == pytest.approx(279e12, rel=0.05)
    assert 2.5 * flops / 2 / backward == pytest.approx(218e12, rel=0.05)


def test_an_older_kernel_loses_on_a_newer_device() -> None:
    old, new = kernels(A100, attention="flash2"), kernels(H100, attention="flash2")
    assert old.attention(1e12, 0, 4096)[0] / new.attention(1e12, 0, 4096)[0] < 989.4 / 312
    long, short = new.attention(1e12, 0, 32768)[0], new.attention(1e12, 0, 512)[0]
    assert short > 1.5 * long


def test_plain_attention_moves_its_scores() -> None:
    few, many = (kernels(attention="plain").attention(1e9, numel, 1024)[0] for numel in (1e6, 1e9))
    assert many - few > 4.5 * 2 * 0.99e9 / 2.039e12


def test_fp8_halves_products_and_pays_for_casts() -> None:
    wide, narrow = kernels(H100), kernels(H100, fp8="tensor")
    large = narrow.linear(65536, 16384, 16384)[0] / wide.linear(65536, 16384, 16384)[0]
    assert 0.55 < large < 0.65
    assert narrow.linear(128, 1024, 1024)[0] > wide.linear(128, 1024, 1024)[0]
    bandwidth = 3.35e12 * MEMORY_SHARE
    eager, fused = (kernels(H100, fp8="tensor", fused=fused).linear(4096, 4096, 4096) for fused in (False, True))
    assert eager[0] - fused[0] == pytest.approx((CAST_BYTES[False] - CAST_BYTES[True]) * 2 * 4096**2 / bandwidth)
    row = kernels(H100, fp8="row").linear(4096, 4096, 4096)
    rate, share = 1978.9e12 * H100.calibration, tile_share(4096, 4096, 4096, H100.num_processors)
    slower = 2 * 4096**3 / (rate * share) * (1 / FP8_PRODUCT["row"] - 1 / FP8_PRODUCT["tensor"])
    assert row[0] - eager[0] == pytest.approx(slower)
    casts = (3 * CAST_BYTES[False] - 2 * TURN_BYTES) * 4096**2 / bandwidth
    assert row[1] - eager[1] == pytest.approx(2 * slower + casts)


def test_power_limits_matmuls_of_any_tiles_and_short_ones_stay_short_of_it() -> None:
    # In steps on an H200: 16384 × 2048 × 8192 in 779 us, 8192 × 4096 × 1024 in 100, 8192 × 1024 × 4096 in 117.
    device = load("h200").node.device
    one = kernels(device, many_tiles=True)
    assert one.product(16384, 2048, 8192) == pytest.approx(779e-6, rel=0.02)
    assert one.product(8192, 4096, 1024) == pytest.approx(100e-6, rel=0.04)
    assert one.product(8192, 1024, 4096) == pytest.approx(117e-6, rel=0.1)
    limit = device.peak_flops["bf16"] * device.calibration
    assert one.product(8192, 4096, 4096) - LAUNCH_SECONDS == pytest.approx(2 * 8192 * 4096 * 4096 / limit)
    freed = kernels(replace(device, calibration=0.9), many_tiles=True)  # as if power were no limit
    assert freed.product(8192, 4096, 4096) < one.product(8192, 4096, 4096)
    assert freed.product(8192, 512, 4096) == pytest.approx(one.product(8192, 512, 4096))
    assert kernels(device).product(4096, 2560, 2560) > one.product(4096, 2560, 2560)  # older libraries: tiles as well


@pytest.mark.parametrize(
    ("batch", "heads", "sequence", "head_dim", "grouped", "forward_us", "backward_us"),
    [
        (2, 32, 4096, 128, True, 551, 1851),
        (1, 32, 8192, 128, True, 1069, 3322),
        (8, 32, 2048, 64, True, 370, 1383),
        (4, 32, 2048, 64, False, 211, 650),
        (2, 32, 2048, 80, False, 144, 455),
        (1, 12, 2048, 128, True, 42, 132),
    ],
)
def test_cudnns_attention_as_measured_in_steps_on_the_h200(
    batch: int, heads: int, sequence: int, head_dim: int, grouped: bool, forward_us: float, backward_us: float
) -> None:
    one = kernels(load("h200").node.device, attention="flash3")
    scores = batch * heads * sequence**2
    found = one.attention(4 * scores * head_dim, scores, sequence, is_grouped=grouped)
    assert found == pytest.approx((forward_us * 1e-6, backward_us * 1e-6), rel=0.12)


@pytest.mark.parametrize(
    ("tokens", "forward", "both"), [(2048, 0.33, 1.485), (4096, 1.165, 5.305), (8192, 4.575, 20.396)]
)
def test_heads_of_192_and_128_as_measured_on_the_h200(tokens: int, forward: float, both: float) -> None:
    scores = 128 * tokens**2  # latent attention: 128 heads
    found = kernels(load("h200").node.device, attention="flash3").attention(2 * scores * (192 + 128), scores, tokens)
    assert found[0] * 1e3 == pytest.approx(forward, rel=0.1)
    assert sum(found) * 1e3 == pytest.approx(both, rel=0.1)


def test_weights_that_stay_fp8_are_cast_for_no_micro_batch() -> None:
    anew, kept = (
        kernels(H100, fp8="tensor", fused=True, keeps_fp8_weights=keeps).linear(4096, 8192, 2048)
        for keeps in (False, True)
    )
    per_byte = 8192 * 2048 / (3.35e12 * MEMORY_SHARE)
    assert anew[0] - kept[0] == pytest.approx(CAST_BYTES[True] * per_byte)
    assert anew[1] - kept[1] == pytest.approx(TURN_BYTES * per_byte)


def test_the_head_stays_in_16_bits() -> None:
    product = Product(8192, 4096, 32768, "head")
    work = Workload(
        BlockWork(),
        (BlockWork(products=(replace(product, kind="column"),)),),
        BlockWork(products=(product,)),
        8192 * 4096,
    )
    plan = Plan(micro_batch=1, precision="bf16")
    wide, narrow = (StepModel(work, load("h100:1x1"), Software(fp8=fp8)) for fp8 in ("", "tensor"))
    assert narrow.part(work.last, plan, 1) == wide.part(work.last, plan, 1)
    assert sum(narrow.part(work.blocks[0], plan, 1)) < 0.8 * sum(wide.part(work.blocks[0], plan, 1))


def test_buckets_that_grow_wait_less_for_many_ranks() -> None:
    numel = 10_000_000  # of a block: four are 40 million, a hundred what 1,000 ranks reduce at once
    work = Workload(BlockWork(), (BlockWork(),) * 400, BlockWork(), 0)
    facts = {"hides_gradients": False, "shards_optimizer": True}

    def reduced(data: int, grows: bool) -> float:
        software = Software(grows_buckets=grows, **facts)  # type: ignore[arg-type]
        model = StepModel(work, load(f"h100:{data}x1"), software, (0, numel, 0))
        return model.step(Plan(data=data, micro_batch=1, precision="bf16"), 1).exposed_seconds["data"]

    for data, fewer in ((8, 300), (1000, 396)):
        hops = 2 * (data - 1) * load("h100").node.inter.latency_seconds  # of a reduce_scatter and a gather
        assert reduced(data, False) - reduced(data, True) == pytest.approx(fewer * hops, rel=1e-6)


def test_a_sharded_optimizer_reduces_over_data_and_context_at_once() -> None:
    work, facts = (
        Workload(BlockWork(), (BlockWork(),) * 4, BlockWork(), 0),
        {"hides_gradients": False, "pipe_outside": True},
    )

    def reduced(data: int, context: int, shards: bool) -> float:
        software = Software(shards_optimizer=shards, **facts)  # type: ignore[arg-type]
        model = StepModel(work, load("h100:4"), software, (0, 10**9, 0))
        plan = Plan(data=data, context=Context(context), micro_batch=1, precision="bf16")
        return model.step(plan, 1).exposed_seconds["data"]

    assert reduced(8, 4, True) == pytest.approx(reduced(32, 1, True))
    assert reduced(8, 4, False) > reduced(8, 1, False)  # one after the other
    each = (4 + 2) * 10**9 * 31 / 32 / (400e9 * 0.85)  # scattered in 4 bytes and gathered in 2, past one node's NICs
    assert reduced(32, 1, True) == pytest.approx(4 * each, rel=0.05)


def test_a_plan_in_fp8_multiplies_linears_of_blocks_so() -> None:
    rows, inputs, outputs = 8192, 4096, 6144
    narrow, ragged = Product(rows, inputs, outputs, "column"), Product(rows, inputs, 6104, "column")
    work = Workload(BlockWork(), (BlockWork(products=(narrow, ragged)),), BlockWork(products=(narrow,)), rows * inputs)
    model = StepModel(work, load("h100:1x1"), Software(fused=True))
    plan = Plan(micro_batch=1, precision="bf16", matmul="fp8", exact=False)
    rate, bandwidth = 1978.9e12 * H100.calibration * FP8_PRODUCT["row"], 3.35e12 * MEMORY_SHARE

    def seconds(m: int, k: int, n: int) -> float:
        return 2 * m * k * n / (rate * tile_share(m, k, n, H100.num_processors)) + LAUNCH_SECONDS

    # Each operand of each product is read in 2 bytes and written in 1: x and w, then dY and w, then dY and x.
    given, weight, result = rows * inputs, inputs * outputs, rows * outputs
    forward = seconds(rows, inputs, outputs) + 3 * (given + weight) / bandwidth
    backward = seconds(rows, outputs, inputs) + seconds(inputs, rows, outputs)
    backward += 3 * (2 * result + given + weight) / bandwidth
    plain = kernels(H100, fused=True).linear(rows, inputs, 6104)  # not in multiples of 16
    assert model.part(work.blocks[0], plan, 1) == pytest.approx((forward + plain[0], backward + plain[1]))
    wide = replace(plan, matmul="compute")
    assert model.part(work.last, plan, 1) == model.part(work.last, wide, 1)
    assert model.chain(plan).forward < 0.95 * model.chain(wide).forward
    old = replace(model, cluster=load("a100-80:1x1"))  # which has none
    assert old.part(work.blocks[0], plan, 1) == old.part(work.blocks[0], wide, 1)


@pytest.mark.parametrize(
    ("precision", "master", "state", "spared"),
    [
        ("bf16", True, "master", 0),
        ("fp64", True, "master", 0),
        ("bf16", True, "bf16", 8),  # two moments, read and written in 2 bytes instead of 4
        ("bf16", False, "bf16", 14),  # weights of 2 bytes read and written, not of 4 and then once of 2
        ("bf16", True, "int8", 4 * (4 - 1 - 4 / 256)),  # codes with a scale for 256 of them
        ("fp32", True, "int8", 4 * (4 - 1 - 4 / 256)),
    ],
)
def test_fewer_bits_of_state_are_fewer_bytes_to_update(
    precision: Precision, master: bool, state: Literal["master", "bf16", "int8"], spared: float
) -> None:
    plan = Plan(micro_batch=1, precision=precision, exact=False, memory=Memory(master=master, state=state))
    assert spared_bytes(plan) == spared
    model = StepModel(
        Workload(BlockWork(), (BlockWork(),), BlockWork(), 0), load("h100:1x1"), Software(), (0, 10**9, 0)
    )
    seconds = (40 - spared) * 1e9 / (3.35e12 * MEMORY_SHARE) + FIXED_SECONDS
    assert model.step(plan, 1).optimizer_seconds == pytest.approx(seconds)


def test_moved_bytes_by_hand() -> None:
    moved = MemoryTraffic(10_000_000, 3, 4_000_000, 1)
    bandwidth = 2.039e12 * MEMORY_SHARE
    assert kernels().moved(moved) == pytest.approx(1e7 / bandwidth + 3 * LAUNCH_SECONDS)
    assert kernels(fused=True).moved(moved) == pytest.approx(4e6 / bandwidth + LAUNCH_SECONDS)
    assert kernels().moved_backward(moved) == pytest.approx(3 * kernels().moved(moved))
    assert kernels(loss_bytes=46).loss(1e6) == pytest.approx(46e6 / bandwidth)


def test_a_device_without_bf16_uses_its_other_16_bits() -> None:
    assert kernels(load("v100-32").node.device).peak == 125e12


def block() -> Workload:
    part = BlockWork(products=(Product(8, 64, 64, "column"), Product(8, 64, 64, "row")))
    return Workload(BlockWork(), (part,) * 4, BlockWork(num_logits=1), 8 * 64)


def test_short_kernels_run_at_the_pace_of_the_host() -> None:
    plan = Plan(micro_batch=1, precision="bf16")
    model = StepModel(block(), load("a100-80"), Software(host_seconds=1.0))
    forward, backward = 2.0, 2.0 * HOST_BACKWARD  # two operations
    assert model.part(model.workload.blocks[0], plan, 1) == (forward, backward)
    full = replace(plan, memory=Memory("full"))
    assert model.part(model.workload.blocks[0], full, 1) == (forward, forward + backward)
    loss = EAGER_LOSS_BYTES / LOSS_OPERATION_BYTES * (1 + HOST_BACKWARD)
    assert model.step(plan, 1).seconds == pytest.approx(4 * (forward + backward) + loss, rel=0.01)


def test_recompute_ends_before_the_last_linear_as_torch_does() -> None:
    linears = [torch.nn.Linear(64, 256), torch.nn.Linear(256, 64)]
    block = torch.nn.Sequential(linears[0], torch.nn.GELU(), linears[1])
    with FlopCounterMode(display=False) as counted:
        stream = torch.zeros(32, 64, requires_grad=True)
        (stream + checkpoint(block, stream, use_reentrant=False)).sum().backward()
    assert counted.get_total_flops() == (6 + 1) * 2 * 32 * 64 * 256  # one of two is computed again

    products = (Product(2048, 4096, 16384, "column"), Product(2048, 16384, 4096, "row", is_last=True))
    work = Workload(BlockWork(()), (BlockWork(products),), BlockWork(()), 2048 * 4096)
    early, whole = (StepModel(work, load("h100"), Software(stops_early=stops)) for stops in (True, False))
    plan = Plan(tensor=Tensor(8), micro_batch=4, memory=Memory("full"), precision="bf16")
    last = kernels(H100).linear(4 * 2048, 16384 // 8, 4096)[0]
    seconds = [one.part(work.blocks[0], plan, 4) for one in (early, whole)]
    assert seconds[1].backward - seconds[0].backward == pytest.approx(last)
    assert seconds[0].forward == seconds[1].forward
    calls = [Counter(call.phase for call in one.calls(work.blocks[0], plan, 4)) for one in (early, whole)]
    assert calls == [{"forward": 1, "backward": 1}, {"forward": 1, "backward": 2}]  # the sum of the last row, and of dI


@pytest.mark.parametrize(
    ("degree", "measured_us"),  # of 1, 4, 16 and 64 MiB, nccl-tests on 8 A100 as published with vTrain
    [(2, (45.1, 60.3, 129.4, 404.0)), (4, (52.7, 75.8, 177.8, 540.6)), (8, (92.2, 94.0, 231.0, 579.6))],
)
def test_all_reduces_of_a100s_as_nccl_tests_have_them(degree: int, measured_us: tuple[float, ...]) -> None:
    model = StepModel(Workload(BlockWork(()), (), BlockWork(()), 0), load("a100-80"), Software())
    plan = Plan(tensor=Tensor(degree))
    for mebibytes, measured in zip((1, 4, 16, 64), measured_us, strict=True):
        assert 1e6 * model.seconds("x", "all_reduce", mebibytes * 2**20, plan) == pytest.approx(measured, rel=0.21)
    sent = model.seconds("x", "send", 2**20, plan)
    assert sent == pytest.approx(3.4e-6 + 2**20 / (300e9 * 0.78))  # a send has no such start


def test_what_runs_beside_compute_costs_a_share() -> None:
    assert beside(10.0, 4.0) == pytest.approx(10 + 4 * OVERLAP_LOSS)
    assert beside(4.0, 10.0) == pytest.approx(10 + 4 * OVERLAP_LOSS)
    assert beside(10.0, 4.0, floor=1.0) == pytest.approx(11 + 4 * OVERLAP_LOSS)
    assert beside(10.0, 4.0, overlaps=False) == 14


def test_collectives_in_pieces_are_hidden() -> None:
    work = block()
    part = BlockWork(products=(Product(8192, 8192, 8192, "column"), Product(8192, 8192, 8192, "row")))
    work = replace(work, blocks=(part,))
    plan = Plan(tensor=Tensor(8, sequence=True), micro_batch=1, precision="bf16")
    plain, pieces, copies = (
        sum(StepModel(work, load("h100"), Software(hides_input=False, **facts)).inside(part, plan, 1))  # type: ignore[arg-type]
        for facts in ({}, {"hides_tensor": True}, {"copies_sequence": True})
    )
    assert pieces < plain < copies


def test_attention_slows_with_the_matmuls_of_its_device() -> None:
    slower = replace(H100, calibration=H100.calibration / 2)
    fast, slow = (kernels(device, attention="flash2").attention(1e15, 0, 8192) for device in (H100, slower))
    assert slow == pytest.approx([2 * seconds for seconds in fast])


def test_a_short_head_costs_plain_attention() -> None:
    # The same scores and twice the FLOPs: were both heads equally efficient, only the products' share would double.
    short, long = (kernels(attention="plain").attention(4 * 1e9 * dim, 1e9, 1024)[0] for dim in (64, 128))
    assert long < 2 * short


def test_a_blocks_host_issues_collectives_beside_kernels() -> None:
    plan = Plan(tensor=Tensor(2), micro_batch=1, precision="bf16")
    model = StepModel(block(), load("a100-80"), Software(host_seconds=1.0))
    assert model.inside(model.workload.blocks[0], plan, 1) == (3.0, 3.0 * HOST_BACKWARD)  # one all-reduce forward


def test_slices_are_reduced_over_every_axis_after_each_micro_batch() -> None:
    product = Product(4096, 4096, 4096, "whole")
    model = StepModel(Workload(BlockWork(), (BlockWork((product,)),), BlockWork(), 1), load("h100:4"), Software())
    model = replace(model, numel=(0, 10**9, 0))
    plan = Plan(data=4, shard=Shard(8, 2), micro_batch=1, precision="bf16")
    sliced = replace(plan, memory=Memory(accumulate="slice"))
    one, two = (model.step(sliced, count) for count in (1, 2))
    for axis in ("data", "shard"):
        assert two.where[axis] == pytest.approx(2 * one.where[axis])
        assert one.where[axis] > 0
    assert sum(two.where.values()) == pytest.approx(two.seconds)
    assert model.step(plan, 2).where["data"] == pytest.approx(model.step(plan, 1).where["data"])  # once a step


# --- context


def attending(key_heads: int = 8) -> Workload:
    """A block of attention alone: 32 heads of 128 on 16,384 tokens."""
    sequence, numel = 16384, 16384 * 128
    part = BlockWork((), 4 * 32 * sequence * numel, 0, sequence, key_heads * numel, key_heads)
    return Workload(BlockWork(), (part,), BlockWork(), 1)


def context_calls(context: Context, recompute: str = "none", x: int = 1, **facts: object) -> Counter[Call]:
    work = attending()
    model = StepModel(work, load("h100:8"), Software(**facts))  # type: ignore[arg-type]
    memory = Memory(recompute)  # type: ignore[arg-type]
    plan = Plan(context=context, tensor=Tensor(x), micro_batch=1, precision="bf16", memory=memory)
    return Counter(model.calls(work.blocks[0], plan, 1))


@pytest.mark.parametrize("kind", ["ring", "all-to-all"])
@pytest.mark.parametrize(("degree", "x"), [(2, 1), (4, 1), (8, 1), (2, 4), (2, 16)])
def test_context_moves_what_its_strategy_states(kind: Literal["ring", "all-to-all"], degree: int, x: int) -> None:
    sizes = (16384 // degree, 128, 2, degree)  # local sequence, head_dim, bytes, degree
    heads, keys = 32 // x, max(1, 8 // x)
    traffic = ring_traffic(1, keys, *sizes) if kind == "ring" else all_to_all_traffic(1, heads, keys, *sizes)
    found = context_calls(Context(degree, kind), x=x)
    for phase, stated in zip(("forward", "backward"), traffic, strict=True):
        told = sum(call.num_bytes * count for call, count in found.items() if call.phase == phase)
        assert told == sum(num_bytes for _, num_bytes in stated)


def test_recompute_asks_for_keys_again() -> None:
    none, full = context_calls(Context(4)), context_calls(Context(4), "full")
    forward = Call("context", "send", 2 * 2 * 8 * 4096 * 128, "forward", beside="attention")
    assert none[forward] == 3
    assert full - none == Counter({forward._replace(phase="backward"): 3})
    assert context_calls(Context(4), "selective") == full  # weft's does not see inside a ring
    assert context_calls(Context(4), "selective", selective="other") == none
    repeated = context_calls(Context(4), repeats_keys=True)
    assert sum(call.num_bytes * n for call, n in repeated.items()) == 4 * sum(c.num_bytes * n for c, n in none.items())


def test_a_ring_hides_behind_attention_and_a_trade_does_not() -> None:
    def inside(cluster: str, kind: Literal["ring", "all-to-all"], **facts: object) -> float:
        work = attending(32)
        model = StepModel(work, load(cluster), Software(host_seconds=0.0, **facts))  # type: ignore[arg-type]
        plan = Plan(context=Context(8, kind), micro_batch=1, precision="bf16")
        return sum(model.inside(work.blocks[0], plan, 1)) - sum(model.part(work.blocks[0], plan, 1))

    told = sum(
        ring_seconds(call.operation, call.num_bytes, 8, 450e9 * 0.78, 3.4e-6) * count
        for call, count in context_calls(Context(8), repeats_keys=True).items()
    )
    assert inside("h100", "ring") == pytest.approx(OVERLAP_LOSS * told)
    assert inside("h100", "all-to-all") > 0
    # Across nodes the eight ranks of one device per node share nothing, but their link is slower than attention.
    assert inside("h100:8x1", "ring") > 2 * inside("h100", "ring")


@given(
    st.sampled_from(
        (Pipe(4), Pipe(3, "gpipe"), Pipe(4, "interleaved", chunks=2), Pipe(2, "zero-bubble"), Pipe(4, "gems"))
    ),
    st.sampled_from((1, 2, 3, 40)),  # with 40 rounds, most are not simulated
    st.lists(st.tuples(st.floats(0.1, 2), st.floats(0.1, 4)), min_size=8, max_size=8),
    st.floats(0, 1),
)
def test_lists_take_as_long_as_their_simulation(
    pipe: Pipe, rounds: int, times: list[tuple[float, float]], message: float
) -> None:
    count = rounds * pipe.degree
    stages = times[: pipe.num_stages]
    halves = [backward / 2 for _, backward in stages]
    schedule = make_schedule(pipe.schedule, pipe.degree, count, **pipe.options)
    timeline = simulate(schedule, [forward for forward, _ in stages], halves, halves, message)
    found = run(pipe, count, tuple(stages), (message,) * len(stages))
    assert found.makespan_seconds == pytest.approx(timeline.makespan_seconds)
    assert found.bubble_share == pytest.approx(timeline.bubble_share, abs=1e-9)
    assert least_makespan(pipe, count, stages, (message,) * len(stages)) <= found.makespan_seconds * (1 + 1e-9)
    least = least_with_any_stages(sum(map(sum, stages)), pipe.degree, count, float(pipe.schedule == "1f1b"))
    assert least <= found.makespan_seconds * (1 + 1e-9)


@given(*[st.sampled_from((1, 2, 3, 8))] * 6)
def test_an_axis_lies_where_the_plan_says(data: int, pipe: int, shard: int, context: int, x: int, y: int) -> None:
    plan = Plan(data=data, pipe=Pipe(pipe), shard=Shard(shard), context=Context(context), tensor=Tensor(x, y))
    assert all(place(plan, axis) == (plan.inner(axis), plan.degree(axis)) for axis in AXES)
    inside = shard * context * x * y
    assert place(plan, "data", pipe_outside=True) == (inside, data)
    assert place(plan, "pipe", pipe_outside=True) == (inside * data, pipe)
    assert place(plan, "shard", pipe_outside=True) == (context * x * y, shard)


@given(
    st.sampled_from((Pipe(), Pipe(2), Pipe(4, "interleaved", chunks=2), Pipe(4, "zero-bubble"))),
    st.sampled_from((1, 2, 8)),
    st.sampled_from((1, 2, 3)),
    st.sampled_from((1, 4)),
    st.integers(1, 8),
)
def test_no_layout_beats_the_bound(pipe: Pipe, shard: int, stage: Literal[1, 2, 3], data: int, count: int) -> None:
    part = BlockWork(products=(Product(8192, 4096, 4096, "column"), Product(8192, 4096, 4096, "row")))
    work = Workload(BlockWork(), (part,) * 16, BlockWork(num_logits=1000), 8192 * 4096)
    model = StepModel(work, load("h100:64"), Software(), (1000, 4096**2 * 2, 1000))
    inner = Plan(micro_batch=1, precision="bf16")
    whole = replace(inner, pipe=pipe, shard=Shard(shard, stage), data=data)
    assert model.bound(replace(inner, pipe=pipe, shard=Shard(shard * data)), count) <= model.step(whole, count).seconds
    assert model.bound(replace(whole, shard=Shard(1)), count) > model.bound(replace(whole, shard=Shard(64)), count)


def test_a_head_that_weft_pads_is_timed_as_padded() -> None:
    head = Product(8192, 768, 50257, "head")
    work = Workload(BlockWork(), (BlockWork(),), BlockWork(products=(head,)), 8192 * 768)
    plan = Plan(micro_batch=1, precision="bf16")

    def seconds(software: Software) -> tuple[float, float]:
        return StepModel(work, load("h100:1x1"), software).part(work.last, plan, 1)

    padded = replace(software_for_text(load("h100:1x1")), head_bytes=0, many_tiles=False)
    assert padded.pads_head
    assert seconds(padded) == pytest.approx(kernels(H100).linear(8192, 768, 50264))
    assert seconds(replace(padded, pads_head=False)) == pytest.approx(kernels(H100).linear(8192, 768, 50257))
    assert kernels(H100).linear(8192, 768, 50257)[0] > 4 * kernels(H100).linear(8192, 768, 50264)[0]
