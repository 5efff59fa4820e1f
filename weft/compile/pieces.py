"""Blocks compiled in pieces: for models whose blocks are large and many kinds, of which whole ones take minutes.

A block's graph is cut at what runs as well uncompiled: convolutions, matmuls and attention call a library's kernel
either way. Pools, which take torch's compiler longer than ten norms, have kernels of their own on GPUs
(weft/models/vision/pool_kernel.py). What lies between them, norms, activations and sums, is compiled; pieces that are
alike, of any block, once. On AmoebaNet-D that is a third of the norms.

Every value has a level: the most cuts on a way to it. A piece is what hangs together within a level, so none waits for
itself. The first block of a kind compiles all of its new pieces, forward and backward, before it waits for any kernel.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._triton import has_triton

from weft.inspection.torch_patches import kernels_at_once

CUTS = ("conv", "pool", "linear", "mm", "matmul", "einsum", "attention")  # in names of functions
IN_PLACE = (operator.setitem, operator.iadd, operator.isub, operator.imul, operator.itruediv)

Run = Callable[..., Any]
Compile = Callable[[fx.GraphModule, list[Tensor]], Run]


class Pieces:
    """A backend for torch.compile that cuts graphs and compiles the pieces with another one."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.compiled: dict[Any, _Piece] = {}  # by code and by the forms of what it is given

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Run:
        compile_: Compile = torch._dynamo.lookup_backend(self.backend)
        nodes = list(module.graph.nodes)
        if not all(_is_plain(node) for node in nodes):
            return compile_(module, inputs)
        units = cut(nodes)
        if not keeps_order(nodes, units):
            return compile_(module, inputs)
        with kernels_at_once():
            return _assembled(module, units, lambda unit: self._piece(unit, compile_)).forward

    def _piece(self, unit: Sequence[fx.Node], compile_: Compile) -> tuple[nn.Module, list[fx.Node], list[fx.Node]]:
        """What computes a unit, what it is given and what it gives."""
        piece, given, results = _extracted(unit)
        values = [node.meta["example_value"] for node in given]
        forms = [(_form(value), value.dtype, value.device, value.requires_grad) for value in values]
        key = piece.code, str(forms), torch.is_grad_enabled()
        if key not in self.compiled:
            self.compiled[key] = _Piece(_compiled(piece, values, compile_), [_form(value) for value in values])
        return self.compiled[key], given, results


class _Piece(nn.Module):
    """A compiled piece, for tensors of the forms that were traced."""

    def __init__(self, run: Run, forms: list[Any]) -> None:
        super().__init__()
        self.run, self.forms = run, forms

    def forward(self, *given: Tensor) -> Any:
        if [_form(one) for one in given] != self.forms:  # an uncompiled function gave another form than it told
            raise torch._dynamo.exc.TorchDynamoException(f"traced {self.forms}, got {[_form(one) for one in given]}")
        return self.run(*given)


def _form(value: Tensor) -> list[tuple[int, int]]:
    """Its sizes, and strides of those that have one."""
    return [(size, stride if size > 1 else 0) for size, stride in zip(value.shape, value.stride(), strict=True)]


# --- where to cut


def cut(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """The units of a graph in an order in which they can run: functions to cut at alone, and pieces between them."""
    levels = _levels(nodes)
    first: dict[fx.Node, fx.Node] = {}  # of what hangs together

    def root(node: fx.Node) -> fx.Node:
        while first[node] is not node:
            node = first[node]
        return node

    for node in nodes:
        if node not in levels:
            continue
        first[node] = node
        if is_cut(node):
            continue
        readers = {reader for one in node.all_input_nodes if one in levels for reader in one.users}
        for other in (*node.all_input_nodes, *readers):
            if other in first and not is_cut(other) and levels[other] == levels[node]:
                first[root(node)] = root(other)
    units: dict[fx.Node, list[fx.Node]] = {}
    for node in first:
        units.setdefault(root(node), []).append(node)
    return sorted(units.values(), key=lambda unit: (levels[unit[0]], not is_cut(unit[0])))


def _levels(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    """Of all that computes. What reads nothing but the graph's inputs waits for the first that reads it."""
    levels: dict[fx.Node, int] = {}
    for node in nodes:
        if node.op not in ("placeholder", "get_attr", "output"):
            levels[node] = max((levels.get(one, 0) for one in node.all_input_nodes), default=0) + is_cut(node)
    for node in reversed(list(levels)):
        readers = [reader for reader in node.users if reader in levels]
        reads_inputs = not any(one in levels for one in node.all_input_nodes)
        if readers and reads_inputs and not is_cut(node):
            levels[node] = min(levels[reader] - is_cut(reader) for reader in readers)
    return levels


def is_cut(node: fx.Node) -> bool:
    return node.op == "call_module" or any(name in _name(node) for name in CUTS)


def _name(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _is_plain(node: fx.Node) -> bool:
    """Whether it gives tensors only: not the state of autocast, or a graph of its own."""
    if node.op == "output":
        return True
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(one, Tensor) for one in values)


def keeps_order(nodes: Sequence[fx.Node], units: Sequence[Sequence[fx.Node]]) -> bool:
    """Whether all that reads memory before it is written over does so in the unit that writes."""
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    for place, node in enumerate(nodes):
        for storage in map(_storage, _written(node)):
            earlier = [one for one in nodes[:place] if _storage(one) == storage]
            readers = {reader for one in earlier for reader in one.users if reader.op != "output"}
            if any(unit_of[reader] != unit_of[node] for reader in readers):
                return False
    return True


def _written(node: fx.Node) -> list[fx.Node]:
    """What it writes over."""
    name = _name(node)
    if name.endswith("_norm"):  # running statistics
        return [one for one in node.args[1:3] if isinstance(one, fx.Node)]
    is_in_place = (name.endswith("_") and not name.endswith("__")) or node.target in IN_PLACE
    if is_in_place or node.kwargs.get("inplace"):
        return [one for one in node.args[:1] if isinstance(one, fx.Node)]
    return [one for one in (node.kwargs.get("out"),) if isinstance(one, fx.Node)]


def _storage(node: fx.Node) -> int | None:
    value = node.meta.get("example_value")
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None


# --- pieces, and the graph around them


def _extracted(unit: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """A unit as a graph of its own, whose names do not tell where it was; what it is given and what it gives."""
    inside = set(unit)
    given = list(dict.fromkeys(one for node in unit for one in node.all_input_nodes if one not in inside))
    results = [node for node in unit if not inside.issuperset(node.users)]
    graph = fx.Graph()
    copies = {node: graph.placeholder(f"given_{number}") for number, node in enumerate(given)}
    for node in unit:
        args, keywords = (fx.map_arg(one, copies.__getitem__) for one in (node.args, node.kwargs))
        copies[node] = graph.create_node(node.op, node.target, args, keywords)  # type: ignore[arg-type]
    graph.output(tuple(copies[node] for node in results))
    return fx.GraphModule(nn.Module(), graph), given, results


def _compiled(piece: fx.GraphModule, values: Sequence[Tensor], compile_: Compile) -> Run:
    """A piece compiled for tensors like `values`, which are fake; its backward too, which computes masks of ReLUs again
    from what norms keep: kept, they would be more than the results that the functions behind a piece keep.
    """
    mode = torch._guards.detect_fake_mode(values)
    assert mode is not None
    with mode:
        inputs = [
            torch.empty_strided(
                one.shape, one.stride(), dtype=one.dtype, device=one.device, requires_grad=one.requires_grad
            )
            for one in values
        ]
    apart = torch._guards.tracing(torch._guards.TracingContext(mode))
    settings = {"force_non_lazy_backward_lowering": True, "ban_recompute_materialized_backward": False}
    with apart, torch._functorch.config.patch(settings):
        return compile_(piece, inputs)


def _assembled(
    module: fx.GraphModule,
    units: Sequence[Sequence[fx.Node]],
    piece_of: Callable[[Sequence[fx.Node]], tuple[nn.Module, list[fx.Node], list[fx.Node]]],
) -> fx.GraphModule:
    """The graph over units. One function alone is called as it is: nothing can be fused with it."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            copies[node] = graph.node_copy(node)
    for number, unit in enumerate(units):
        if len(unit) == 1:
            copies[unit[0]] = copy = graph.node_copy(unit[0], copies.__getitem__)
            copy.target = by_kernel(unit[0]).get(copy.target, copy.target)
            continue
        piece, given, results = piece_of(unit)
        module.add_module(f"piece_{number}", piece)
        made = graph.call_module(f"piece_{number}", tuple(copies[node] for node in given))
        for place, node in enumerate(results):
            copies[node] = graph.call_function(operator.getitem, (made, place))
    graph.node_copy(module.graph.output_node(), copies.__getitem__)
    return fx.GraphModule(module, graph)


def by_kernel(node: fx.Node) -> Mapping[Any, Run]:
    """Functions for which weft has another, where the node's result is."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.device.type != "cuda" or not has_triton():
        return {}
    from weft.models.vision import pool_kernel

    return pool_kernel.kernel_pools()
