"""How a framework runs a step, apart from the plan: weft itself, compiled or not, or another framework."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from weft.cluster.cpu_rates import is_cpu
from weft.cluster.hardware import Cluster
from weft.profiling.workload import BlockWork

# Bytes per logit, forward and backward, of torch's own cross-entropy in float32 (measured on an H200: 46) and of one
# that torch.compile fuses (11). Special kernels move less: they read logits once, and once more to write the gradient.
EAGER_LOSS_BYTES, COMPILED_LOSS_BYTES, FUSED_LOSS_BYTES = 46, 11, 8
# Constants of weft's own trainer, from an H200. To add a 16-bit gradient to an fp32 one moves 10 bytes, and torch's
# kernel for mixed types reaches less than half of the bandwidth (5.3 ps per parameter, for 1.5 and 8 billion
# parameters); the head's gradient takes 7.1 to 7.8 ps. Both host times come from one configuration, 8 × 1 × 2,048
# tokens of Qwen2 1.5B: in no other one does the device wait for its host.
ALONE_BYTES, SUM_BYTES, HEAD_BYTES = 6, 22, 32
CALL_SECONDS, GRADIENT_SECONDS = 0.3e-3, 80e-6


@dataclass(frozen=True)
class Software:
    """How a framework runs a step, apart from the plan. The defaults are weft's own, uncompiled.

    `attention`: a key of FLASH, "flash3", or "plain", which keeps scores in memory. `fused`: operations between matmuls
    are one kernel (torch.compile, or fused by hand). `compiled`: blocks are compiled by torch.compile one by one, which
    then decides what is saved for backward. `host_seconds`: the host's time to issue one operation; if kernels are
    shorter, the host sets the pace. `loss_bytes`: bytes moved for each logit by the loss, forward and backward.
    `selective`: what selective recompute repeats: "cheap" operations, the "attention", or with "other" every second
    matmul and the cheap operations. `stops_early`: full recompute stops at the last tensor that backward needs, before
    a block's last linear layer (torch's non-reentrant checkpoint, since 2.1). `pads_head`: the classes are padded to a
    multiple of 16 bytes if the head is not split. `gradient_bytes`: bytes per parameter that are reduced; with
    `hides_gradients`, during the last backward. `hides_input`: the sum of dI runs during dW. `hides_tensor`:
    collectives of x run in pieces beside the pieces of their matmul. `copies_sequence`: the sequence is not the
    outermost dimension, so gathered or scattered tensors are copied once more. `fp8`: linear layers except the head use
    fp8, scaled per "tensor" (then tensors are cast before they are gathered along the sequence) or per "row".
    `keeps_fp8_weights`: weights are cast in a step's first micro-batch and used by all. `splits_messages`: each rank of
    x sends its part of a message between stages. `grows_buckets`: gradients are reduced in buckets that grow with the
    ranks of data, not block by block. `imbalance`: the tokens that arrive at the busiest rank of `expert`, divided by
    the mean; it depends on the routing, which no plan knows. `row_copies`: kernels beside experts' matmuls that take as
    long as so many copies of the rows, (forward, backward), beyond one kernel that sorts rows and one that adds up
    results. `sort_copies`: the same for sorting the rows that arrive by expert, and back, if a rank has several.
    `reduces_by_stage`: a rank with several stages reduces the gradients of one while the backward of the others runs.
    `adds_expert_gradients`: the matmuls of experts' gradients add them up in fp32.
    """

    attention: str = "flash2"
    fused: bool = False
    compiled: bool = False
    fp8: str = ""
    keeps_fp8_weights: bool = False
    host_seconds: float = 10e-6
    loss_bytes: float = EAGER_LOSS_BYTES
    selective: str = "cheap"
    stops_early: bool = True
    pads_head: bool = False
    gradient_bytes: int = 4
    hides_gradients: bool = True
    hides_input: bool = True
    hides_tensor: bool = False
    overlaps: bool = True  # collectives run while a device computes; on a CPU the same cores do both
    copies_sequence: bool = False
    splits_messages: bool = False
    grows_buckets: bool = False
    reduces_by_stage: bool = False
    imbalance: float = 1.0
    row_copies: tuple[float, float] = (0.0, 0.0)
    sort_copies: float = 0.0
    adds_expert_gradients: bool = False
    splits_experts: bool = False  # x splits each expert as it splits an MLP (Megatron's expert tensor parallelism)
    shards_optimizer: bool = False  # over data, expert and context; ranks of data are then inside pipe
    # `shard` cuts all parameters but experts over the ranks of `expert`, too; these and experts travel at once
    shards_over_expert: bool = False
    fuses_ring: bool = False  # one kernel adds up the partial results of ring attention
    repeats_keys: bool = False  # keys and values are copied for every query head before attention
    equal_stages: bool = False  # pipeline stages have equal numbers of blocks; weft balances them
    pipe_outside: bool = False  # pipe is outside data in the order of ranks; in weft data is outside
    # Bytes moved per parameter: AdamW and new 16-bit weights 30, the norm 4, taking gradients 6. (On one rank: 28, 2
    # and 4.)
    optimizer_bytes: int = 40
    gathers_again: bool = False  # `shard` gathers parameters for recompute, and once more for backward
    # Are matmul libraries as of cuBLAS since 2024 used (NEWER_TILES)? Then power limits newer devices.
    many_tiles: bool = False
    # The part of `optimizer_bytes` that a single rank with one micro-batch saves: gradients are taken together with
    # their norm.
    alone_bytes: int = 0
    # Bytes at full bandwidth to add the gradient of one more micro-batch, per parameter; and per element of the head's
    # weight if its gradient is added up in fp32 with the loss, then scaled and rounded.
    sum_bytes: int = 0
    head_bytes: int = 0
    # Host time to call a compiled block, forward or backward, and host time per parameter's gradient.
    call_seconds: float = 0.0
    gradient_seconds: float = 0.0


def software_for_text(cluster: Cluster, compiles: bool | None = None) -> Software:
    """How weft trains language models on a cluster, with the fastest attention kernel.

    `compiles` is the run's setting; None compiles on GPUs.
    """
    is_newer = cluster.node.device.is_newer and not is_cpu(cluster)
    attention = "flash3" if is_newer else "flash2"  # cuDNN has a kernel for Hopper
    if "bf16" not in cluster.node.device.peak_flops and cluster.node.device.peak_flops:
        attention = "plain"  # FlashAttention-2 needs an A100 or newer
    if not (not is_cpu(cluster) if compiles is None else compiles):
        return Software(attention, pads_head=not is_cpu(cluster), many_tiles=True, overlaps=not is_cpu(cluster))
    loss_bytes = COMPILED_LOSS_BYTES if is_cpu(cluster) else FUSED_LOSS_BYTES
    return Software(
        attention,
        fused=True,
        compiled=True,
        loss_bytes=loss_bytes,
        pads_head=not is_cpu(cluster),
        overlaps=not is_cpu(cluster),
        many_tiles=True,
        alone_bytes=ALONE_BYTES,
        sum_bytes=SUM_BYTES,
        head_bytes=HEAD_BYTES,
        call_seconds=CALL_SECONDS,
        gradient_seconds=GRADIENT_SECONDS,
    )


class BlockPass(NamedTuple):
    """One micro-batch of `micro_batch` sequences or images in one block, as a framework runs it.

    `is_block` is false for the work before the first and after the last block, which is never recomputed.
    """

    work: BlockWork
    micro_batch: float
    software: Software
    is_block: bool = True
