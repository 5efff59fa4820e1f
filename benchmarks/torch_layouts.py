"""Torch's own way to weft's layouts of a Llama, in the strongest form that its documentation shows, and what it says.

Collectives are counted at torch's dispatcher, where DDP's, FSDP2's and DTensor's all pass, in the ledger's convention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.models import Decoder

Totals = dict[str, Counter[str]]


def ddp(model: Decoder) -> nn.Module:
    """Its faster form: gradients live in the buckets."""
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def fsdp(model: Decoder, reshard: bool, mesh: DeviceMesh | None = None) -> nn.Module:
    """One unit for each block and the root, which stays gathered after forward, as FSDP2 does by itself."""
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
    fully_shard(model, mesh=mesh, reshard_after_forward=None if reshard else False)
    return model


def tensor_parallel(model: Decoder, sequence: bool, mesh: DeviceMesh | None = None) -> nn.Module:
    """As torchtitan lays out a Llama: vocabulary rows, columns and rows in each block, logits split for the loss.

    Without `sequence`, PrepareModuleInput makes the columns of a block share one input, so that its gradient is summed
    once and not for each column.
    """
    mesh = mesh or init_device_mesh("cpu", (dist.get_world_size(),))
    stream = Shard(1) if sequence else Replicate()
    norm = {"norm": SequenceParallel()} if sequence else {}
    column, row = ColwiseParallel, RowwiseParallel
    whole_model: dict[str, Any] = {
        "model.embed_tokens": row(input_layouts=Replicate(), output_layouts=stream),
        "lm_head": column(input_layouts=stream, output_layouts=Shard(-1), use_local_output=False),
        **{f"model.{name}": style for name, style in norm.items()},
    }
    parallelize_module(model, mesh, whole_model)
    for block in model.model.layers:
        styles: dict[str, Any] = {
            "self_attn": PrepareModuleInput(
                input_layouts=(stream, None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "mlp": PrepareModuleInput(input_layouts=(stream,), desired_input_layouts=(Replicate(),)),
            **{f"self_attn.{name}_proj": column() for name in "qkv"},
            "self_attn.o_proj": row(output_layouts=stream),
            "mlp.gate_proj": column(),
            "mlp.up_proj": column(),
            "mlp.down_proj": row(output_layouts=stream),
        }
        if sequence:
            styles |= {"input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel()}
        parallelize_module(block, mesh, styles)
    return model


def tensor_parallel_fsdp(model: Decoder, x: int, sequence: bool) -> nn.Module:
    """Both, with the joint mesh that DTensor wants for one all-reduce of the norm instead of two."""
    mesh = init_device_mesh("cpu", (dist.get_world_size() // x, x), mesh_dim_names=("shard", "x"))
    mesh._flatten("state")
    tensor_parallel(model, sequence, mesh["x"])
    return fsdp(model, True, mesh["shard"])


# --- what they say


class Tally:
    """Calls, bytes of the whole tensors, and the bytes that a ring sends for them."""

    def __init__(self) -> None:
        self.totals: Totals = {"calls": Counter(), "bytes": Counter(), "wire_bytes": Counter()}

    def add(self, operation: str, calls: int, num_bytes: int, degree: int) -> None:
        sends = (2 if operation == "all_reduce" else 1) * num_bytes * (degree - 1) // degree
        for key, value in (("calls", calls), ("bytes", num_bytes), ("wire_bytes", sends)):
            self.totals[key][operation] += value


class CountCalls(TorchDispatchMode):
    """Counts collectives at the dispatcher, where DDP's, FSDP2's and DTensor's all pass."""

    # operation of weft's ledger, and which argument is its whole tensor
    OPERATIONS: Mapping[str, tuple[str, int]] = {
        "c10d::allreduce_": ("all_reduce", 0),
        "c10d::_allgather_base_": ("all_gather", 0),
        "c10d::_reduce_scatter_base_": ("reduce_scatter", 1),
        "c10d::alltoall_base_": ("all_to_all", 1),
        "c10d::broadcast_": ("broadcast", 0),
        "c10d::send": ("send", 0),
        "_c10d_functional::all_reduce": ("all_reduce", 0),
        "_c10d_functional::all_reduce_": ("all_reduce", 0),
        "_c10d_functional::all_gather_into_tensor": ("all_gather", 0),
        "_c10d_functional::reduce_scatter_tensor": ("reduce_scatter", 0),
    }
    SILENT = (
        "c10d::barrier",
        "c10d::recv_",  # the sender counts it
        "_c10d_functional::wait_tensor",
        "_c10d_functional::_wrap_tensor_autograd",
    )

    def __init__(self) -> None:
        super().__init__()
        self.tally = Tally()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # DTensor takes it apart first; its collectives come by again
        name = func._schema.name
        if name in self.OPERATIONS:
            self._record(name, args)
        else:
            assert "c10d" not in name or name in self.SILENT, f"{name} is not counted"
        return func(*args, **(kwargs or {}))

    def _record(self, name: str, args: Any) -> None:
        operation, whole = self.OPERATIONS[name]
        num_bytes = sum(leaf.numel() * leaf.element_size() for leaf in tree_leaves(args[whole]))
        if name.startswith("c10d"):
            group = next(dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
        else:
            group = _resolve_process_group(args[-1])
            num_bytes *= group.size() if operation == "all_gather" else 1  # there the argument is the part
        self.tally.add(operation, 1, num_bytes, group.size())
