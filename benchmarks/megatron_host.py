"""What the host takes to issue an operation of a Megatron layer: measured, for the planner's tables of Megatron runs.

    pip install megatron-core==0.9.0 && python benchmarks/megatron_host.py

Layers so small that the GPU waits for the host, as Megatron-LM ran them until 2023: attention with scores in memory,
kernels fused by torch.jit.script, dropout under the tracker of random states. The seconds of a layer over the
operations that the planner counts in it (a test holds `MEGATRON_OPERATIONS` to that) give `Software.host_seconds`;
those of backward over forward's give `host_backward`. Another machine's host has other times: this is one machine, and
it is named.
Writes benchmarks/results/megatron-host.json.
"""

from __future__ import annotations

import json
import os
import statistics
import time

import harness
import torch
import torch.distributed as dist

NUM_LAYERS, HEADS, SEQUENCE, NUM_STEPS, WARM_STEPS = 8, 8, 128, 40, 10


def layers(hidden: int) -> torch.nn.Module:
    """Megatron-Core's layers without Transformer Engine."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=NUM_LAYERS,
        hidden_size=hidden,
        num_attention_heads=HEADS,
        params_dtype=torch.bfloat16,
        bf16=True,
        pipeline_dtype=torch.bfloat16,
        bias_dropout_fusion=True,
        bias_activation_fusion=True,
        masked_softmax_fusion=False,  # its kernel is an extension; torch's softmax stands in
        gradient_accumulation_fusion=False,
        attention_softmax_in_fp32=False,
    )
    model: torch.nn.Module = TransformerBlock(config, get_gpt_layer_local_spec(), post_layer_norm=False)
    return model.cuda().bfloat16().train()


def measure(hidden: int) -> dict[str, float]:
    """Median seconds of one layer, forward and backward, and kernels that a forward starts."""
    model = layers(hidden)
    given = torch.randn(SEQUENCE, 1, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").triu(1).bool()
    gradient = torch.randn_like(given)
    forward, backward = [], []
    for step in range(WARM_STEPS + NUM_STEPS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = model(given, mask)
        torch.cuda.synchronize()
        middle = time.perf_counter()
        out.backward(gradient)
        torch.cuda.synchronize()
        if step >= WARM_STEPS:
            forward.append((middle - start) / NUM_LAYERS)
            backward.append((time.perf_counter() - middle) / NUM_LAYERS)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        model(given, mask)
        torch.cuda.synchronize()
    kernels = sum(event.count for event in seen.key_averages() if event.self_device_time_total) / NUM_LAYERS
    return {
        "forward_seconds": statistics.median(forward),
        "backward_seconds": statistics.median(backward),
        "kernels": kernels,
    }


def main() -> None:
    given = harness.options(__doc__, "megatron-host.json").parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29577", RANK="0", WORLD_SIZE="1")
    os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "1"
    dist.init_process_group("nccl")
    try:
        import megatron.core
        import megatron.core.jit
    except ImportError as error:
        raise SystemExit("needs Megatron-Core: pip install megatron-core==0.9.0") from error
    megatron.core.jit.jit_fuser = torch.jit.script  # as before torch 2.2
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(1, 1)
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    found = {hidden: measure(hidden) for hidden in (512, 1024)}
    forward = statistics.mean(case["forward_seconds"] for case in found.values())
    backward = statistics.mean(case["backward_seconds"] for case in found.values())
    result = {
        "megatron_core": megatron.core.__version__,
        "layers": found,
        "layer_seconds": forward,
        "host_backward": backward / forward,
    }
    harness.write(given.out, result, device="cuda")
    print(json.dumps(result, indent=2))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
