"""Walks autograd's graph of a forward, from results back to the tensors that they depend on."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor


def nodes_behind(results: Iterable[Tensor], stops: Collection[Any] = ()) -> set[Any]:
    """Returns the nodes of the graph that made some tensors. The walk does not pass those in `stops`."""
    found: set[Any] = set()
    left: list[Any] = [tensor.grad_fn for tensor in results]
    while left:
        node = left.pop()
        if node is not None and node not in found and node not in stops:
            found.add(node)
            left += [other for other, _ in node.next_functions]
    return found


def leaves_of(nodes: Iterable[Any]) -> list[Tensor]:
    """Returns the tensors without a history among those that the nodes stand for, such as parameters."""
    return [node.variable for node in nodes if hasattr(node, "variable")]
