"""Merges the nodes of a graph that compute the same: common subexpressions.

torch.compile does this before it cuts a graph into forward and backward. Its own pass gives the same graph, but first
imports all kernels of inductor, which takes longer than the trace of a block.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils._pytree import tree_flatten


def merge_equal_nodes(graph: fx.Graph) -> bool:
    """Replaces each node of a graph by the first node with the same function and arguments.

    Random functions, `empty` and nodes that share memory with a result of the graph stay. Returns False, and changes
    nothing, if a function of the graph writes to its arguments.
    """
    from torch._functorch.compile_utils import aten, get_aten_target, rand_ops  # imports torch's compiler: seconds

    if any(map(_writes, graph.nodes)):
        return False
    results = {storage_of(node) for node in graph.output_node().all_input_nodes} - {None}
    unique = {*rand_ops, aten.empty}
    first: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if node.op != "call_function" or get_aten_target(node) in unique or storage_of(node) in results:
            continue
        leaves, form = tree_flatten((node.args, node.kwargs))
        # With types, as 1 == 1.0 == True.
        same = first.setdefault((node.target, str(form), *((leaf, type(leaf)) for leaf in leaves)), node)
        if same is not node:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
    return True


def _writes(node: fx.Node) -> bool:
    """May a node write to its arguments? Of operators other than those of torch, only `getitem` is known not to."""
    if node.op in ("placeholder", "get_attr", "output"):
        return False
    return node.target._schema.is_mutable if isinstance(node.target, OpOverload) else node.target is not getitem


def storage_of(node: Any) -> int | None:
    """Returns what identifies the memory of a node's tensor; None for anything else."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None
