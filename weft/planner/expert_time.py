"""The time of a block's experts on one rank: their grouped matmuls, and what software adds to them.

The matmuls of a rank's experts run as one kernel, so no processor waits for a wave of tiles, but each expert has only
its own rows. If tensor ranks split experts (`Software.splits_experts`), a rank multiplies the rows of all these ranks
by its part of each expert.
"""

from __future__ import annotations

import math

from weft.parallel.expert.layers import row_parts
from weft.plan import Plan
from weft.planner.kernels import FP8_PRODUCT, Kernels
from weft.profiling.workload import BlockWork

# Bytes for each weight of experts in fp8: read and written in forward, and in backward in the other orientation.
EXPERT_CAST_BYTES = 3
# Bytes for each element of rows that were sent, or have slots, in forward and in backward: rounded to fp8 (3), moved so
# that experts end at a multiple (2), and the results moved back (4). Other rows are rounded as tokens, and gathered
# anyway (`parallel/fp8/experts.py`).
SENT_ROW_BYTES = 9
# A matmul that adds its result to gradients in fp32 reads and writes these after its products. On an H200 this took as
# long as 6.6 to 9.4 bytes for each element with 256 to 1,024 rows, and 3.3 to 6.7 with 2,048 and 4,096
# (`benchmarks/expert_kernels.py`). Devices are calibrated on runs whose matmuls have about 4,096 rows and more, so the
# time of so many rows is in the calibration already.
ADDED_BYTES, CALIBRATED_ROWS = 8, 4096


def expert_seconds(part: BlockWork, plan: Plan, scale: float, kernels: Kernels) -> tuple[float, float]:
    """Returns (forward, backward) seconds of the experts of a block for `scale` sequences."""
    if not part.expert_products:
        return 0.0, 0.0
    software, device = kernels.software, kernels.device
    split = plan.tensor.x if software.splits_experts else 1
    uneven = plan.num_expert_parts > 1 and not part.is_routed_evenly
    share = scale * (software.imbalance if uneven else 1)
    share /= math.prod(row_parts(plan)) * (plan.tensor.x if plan.tensor.sequence else 1)
    num_experts = max(1, part.num_experts // plan.num_expert_parts)  # on a rank
    products = rows_gradient = weights_gradient = 0.0
    for one in part.expert_products:
        all_rows, inputs, outputs = one.local(split, 1)
        rows = max(1, math.ceil(all_rows * share * split / num_experts))  # of each expert
        times = one.flops * share / (2 * rows * inputs * outputs)  # experts, with a fraction for rounded rows
        products += times * kernels.grouped_product(rows, inputs, outputs)
        rows_gradient += times * kernels.grouped_product(rows, outputs, inputs)
        weights_gradient += times * kernels.grouped_product(inputs, rows, outputs)
        if software.adds_expert_gradients:
            added = ADDED_BYTES * num_experts * inputs * outputs * max(0.0, 1 - rows / CALIBRATED_ROWS)
            weights_gradient += added / kernels.bytes_per_second
    forward, backward = products, rows_gradient + weights_gradient
    fp8 = "row" if plan.matmul == "fp8" else software.fp8
    if fp8 and "fp8" in device.peak_flops:
        product = part.expert_flops * share / (device.peak_flops["fp8"] * device.calibration * FP8_PRODUCT[fp8])
        is_sent = plan.num_expert_parts > 1 or part.is_routed_evenly
        is_cast = not software.keeps_fp8_weights
        moved = is_cast * EXPERT_CAST_BYTES * part.expert_numel / plan.num_expert_parts
        moved += is_sent * SENT_ROW_BYTES * part.routed_numel * share
        forward, backward = (count * product + moved / kernels.bytes_per_second for count in (1, 2))
    copied = [_copied_rows(part, share, copies, split, num_experts, kernels) for copies in software.row_copies]
    return forward + copied[0], backward + copied[1]


def _copied_rows(part: BlockWork, share: float, copies: float, split: int, num_experts: int, kernels: Kernels) -> float:
    """Seconds of the software's copies of rows, beside the one that sorts them and the one that adds up results."""
    sorts = 2 * split * kernels.software.sort_copies if num_experts > 1 else 0.0
    return (copies + sorts) * 2 * kernels.item_bytes * part.routed_numel * share / kernels.bytes_per_second
