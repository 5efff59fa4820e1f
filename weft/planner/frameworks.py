"""How other frameworks run a step: facts about those of published tables and famous runs, each with its source.

They are the same for every row of a table. Those not re-checked at the source are marked so.
"""

from __future__ import annotations

from dataclasses import replace

from weft.profiling.software import EAGER_LOSS_BYTES, FUSED_LOSS_BYTES, Software

# Megatron-LM, 2020 to 2022: attention with scores in memory, kernels fused by hand, all-reduces that nothing hides
# (later ones hide dI's; the tables' scripts do not), 16-bit gradients, sends split over tensor ranks (SC 2021, 4.1),
# tensor ranks next to each other, then those of data, then stages.
# Its cross-entropy passes 56 bytes for a logit: cast, maximum, difference, exponential, sum, quotient; then the
# gradient and its cast. What its host takes for the forward of a layer was measured (`benchmarks/megatron_host.py`, on
# another host than the tables'); the planner counts so many operations in it.
MEGATRON_LAYER_SECONDS, MEGATRON_OPERATIONS = 1.2168e-3, 16
# Read and written for each parameter by a fused Adam with 16-bit weights and fp32 state.
FUSED_ADAM_BYTES = 30
MEGATRON = Software(
    optimizer_bytes=FUSED_ADAM_BYTES,
    attention="plain",
    fused=True,
    host_seconds=MEGATRON_LAYER_SECONDS / MEGATRON_OPERATIONS,
    loss_bytes=56,
    selective="attention",
    stops_early=False,
    gradient_bytes=2,
    hides_gradients=False,
    hides_input=False,
    splits_messages=True,
    pipe_outside=True,
    equal_stages=True,
)
# Megatron-Core: the README of its table names the three overlaps (--overlap-grad-reduce, --overlap-param-gather,
# --tp-comm-overlap) and the distributed optimizer; gradients are reduced in fp32 with bf16. Whether Transformer Engine
# took FlashAttention-2 or cuDNN is not printed: the former is assumed (the latter gives 3 % shorter steps).
# Buckets of gradients grow with the ranks of data (its distributed_data_parallel.py). Transformer Engine keeps the fp8
# weights of a step's first micro-batch (`is_first_microbatch` in its documentation), and the head is no layer of its.
CORE = replace(
    MEGATRON,
    attention="flash2",
    gradient_bytes=4,
    hides_gradients=True,
    hides_tensor=True,
    shards_optimizer=True,
    fuses_ring=True,
    host_seconds=10e-6,
    grows_buckets=True,
    keeps_fp8_weights=True,
)
# Megatron-Core with experts before Transformer Engine 2.1 (March 2025), which has fused kernels for their rows: torch's
# own index_select, product with the weights and scatter_add, and in backward gather, two products, a sum and index_add
# (in its `moe_utils`, `permute` and `unpermute` if not fused). On an H200 these take as long as
# 0.75, 2.4, 3.9 and 0.75, 2.4, 1.65, 8.0 copies of the rows (`benchmarks/expert_kernels.py`). The planner counts 1.5
# copies in forward for kernels that do it in one pass, and twice that in backward; the rest is here. Rows that arrive
# are sorted by `split` and `cat`, 1.45 copies. Gradients of experts are added up in fp32. Those of a stage are reduced
# after its own last micro-batch (by its schedules); this holds for models without experts, too, but makes
# the errors of Megatron-Core's table larger (docs/measured/experts.md).
CORE_EXPERTS = replace(CORE, row_copies=(5.5, 9.8), sort_copies=1.45, adds_expert_gradients=True, reduces_by_stage=True)
# Megatron-Core's own FSDP (`custom_fsdp` of early 2025, later named Megatron FSDP; its guide and source): layers are
# gathered one ahead, in forward and once for recompute and backward; gradients are reduced in fp32 after every
# micro-batch. Experts are cut over the ranks that hold the same ones, and all else over the ranks of `expert`, too: two
# groups of ranks, whose collectives run at once. The matmuls of gradients do not add to fp32
# (`--no-gradient-accumulation-fusion`): a copy casts them, 6 bytes for each parameter of every micro-batch.
CORE_FSDP = replace(
    CORE_EXPERTS, shards_optimizer=False, shards_over_expert=True, adds_expert_gradients=False, sum_bytes=6
)
# llm-foundry: eager, attn_impl = triton, fused_crossentropy, FSDP that reduces every micro-batch; mixed_precision PURE
# reduces in bf16 and DEFAULT in fp32 (the kernel: its scripts/train/benchmarking; the rest not re-checked). It
# recomputes without reentrance (submit_benchmarks.py). PURE is the older sweep, of torch 1.13.1; DEFAULT that of its
# pull request 543 of October 2023, which names torch 2.0.1 and a nightly of 2.1: only the latter stops recompute early
# (pull request 96866 of pytorch); it is assumed.
FOUNDRY = Software(
    attention="flash1", host_seconds=12e-6, loss_bytes=FUSED_LOSS_BYTES, optimizer_bytes=FUSED_ADAM_BYTES
)
# torchtitan: FSDP2 and DTensor; the sequence is dimension 1, so that gathers and scatters copy; selective recompute of
# "op" keeps every second matmul only; keys are repeated before attention; asyncTP runs collectives in pieces (its
# source, not re-checked).
TITAN = Software(
    equal_stages=True,
    optimizer_bytes=FUSED_ADAM_BYTES,
    repeats_keys=True,
    hides_input=False,
    copies_sequence=True,
    selective="other",
    loss_bytes=EAGER_LOSS_BYTES,
)
# AxoNN: flash attention, dI's all-reduce behind dW, gathers and scatters of weights overlapped; a layer gathers its
# weights in forward, in recompute and in backward (its source, not re-checked).
AXONN = Software(
    equal_stages=True, optimizer_bytes=FUSED_ADAM_BYTES, gradient_bytes=2, gathers_again=True, stops_early=False
)
# Megatron-DeepSpeed: what DeepSpeed adds. With bf16, its BF16_Optimizer casts the gradient of every micro-batch to fp32
# (6 bytes for each parameter), adds it to a sum in fp32 (12 bytes), and reduces that sum (its bf16_optimizer.py; the
# bytes, and that MT-NLG ran with it, are not re-checked). With fp16, autograd adds gradients in 16 bits (6 bytes).
DEEPSPEED_BF16 = replace(MEGATRON, gradient_bytes=4, sum_bytes=18)
DEEPSPEED_FP16 = replace(MEGATRON, sum_bytes=6)
# With --use-flash-attn, and without --use-flash-attn-v2 (the scripts of Frontier).
DEEPSPEED_FP16_FLASH = replace(DEEPSPEED_FP16, attention="flash1")
# The frameworks of famous runs, by the names in `famous_runs.csv`.
FRAMEWORKS = {
    "megatron": MEGATRON,
    "megatron-core": CORE,
    "megatron-deepspeed-bf16": DEEPSPEED_BF16,
    "megatron-deepspeed-fp16": DEEPSPEED_FP16,
    "megatron-deepspeed-fp16-flash": DEEPSPEED_FP16_FLASH,
}
