"""Compiles blocks in pieces, for models with large blocks of many kinds. Whole blocks of them take minutes to compile.

A block's graph is cut at functions that gain nothing from compiling: convolutions, matmuls and attention call a
library's kernel either way. Pools, which take torch's compiler longer than ten norms, have Triton kernels on GPUs
(`models/vision/pool_kernel.py`). The norms, activations and sums between the cuts are compiled. Equal pieces, of any
block, are compiled once. On AmoebaNet-D that is a third of the norms.

Every value has a level: the largest number of cuts on a path to it. A piece is a connected part of the graph within one
level, so no piece depends on itself. The first block of a kind compiles all of its new pieces, forward and backward,
before it waits for any kernel.
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

Function = Callable[..., Any]
Compile = Callable[[fx.GraphModule, list[Tensor]], Function]


class PieceCompiler:
    """A backend for torch.compile that cuts graphs, and compiles the pieces with another backend."""

    def __init__(self, backend: str) -> None:
        self.backend = backend
        self.compiled: dict[Any, _CompiledPiece] = {}  # by code and by shapes, strides and dtypes of inputs

    def __call__(self, module: fx.GraphModule, inputs: list[Tensor]) -> Function:
        compile_: Compile = torch._dynamo.lookup_backend(self.backend)
        nodes = list(module.graph.nodes)
        if not all(_is_plain(node) for node in nodes):
            return compile_(module, inputs)
        units = split_into_units(nodes)
        if not keeps_order(nodes, units):
            return compile_(module, inputs)
        with kernels_at_once():
            return _assemble(module, units, lambda unit: self._piece(unit, compile_)).forward

    def _piece(self, unit: Sequence[fx.Node], compile_: Compile) -> tuple[nn.Module, list[fx.Node], list[fx.Node]]:
        """Returns the compiled module of a unit, its input nodes and its output nodes."""
        piece, given, results = _extract_piece(unit)
        values = [node.meta["example_value"] for node in given]
        forms = [(_form(value), value.dtype, value.device, value.requires_grad) for value in values]
        key = piece.code, str(forms), torch.is_grad_enabled()
        if key not in self.compiled:
            self.compiled[key] = _CompiledPiece(
                _compile_piece(piece, values, compile_), [_form(value) for value in values]
            )
        return self.compiled[key], given, results


class _CompiledPiece(nn.Module):
    """A compiled piece. It accepts only tensors with the sizes and strides that were traced."""

    def __init__(self, run: Function, forms: list[Any]) -> None:
        super().__init__()
        self.run, self.forms = run, forms

    def forward(self, *given: Tensor) -> Any:
        # The function before a piece, which runs uncompiled, may return other strides than in the trace.
        if [_form(one) for one in given] != self.forms:
            raise torch._dynamo.exc.TorchDynamoException(f"traced {self.forms}, got {[_form(one) for one in given]}")
        return self.run(*given)


def _form(value: Tensor) -> list[tuple[int, int]]:
    """Returns (size, stride) of each dim; the stride of a dim of size 1 is 0, because it does not matter."""
    return [(size, stride if size > 1 else 0) for size, stride in zip(value.shape, value.stride(), strict=True)]


# --- where to cut


def split_into_units(nodes: Sequence[fx.Node]) -> list[list[fx.Node]]:
    """Returns the units of a graph in an order in which they can run.

    A unit is a single function at which the graph is cut, or a piece between cuts.
    """
    levels = _levels(nodes)
    first: dict[fx.Node, fx.Node] = {}  # node -> another node of its piece (union-find)

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
    """Returns the level of each node that computes: the largest number of cuts on a path to it.

    A node that reads only inputs of the graph gets the level of its first reader.
    """
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
    """Is the graph cut at this node?"""
    return node.op == "call_module" or any(name in _name(node) for name in CUTS)


def _name(node: fx.Node) -> str:
    if node.op not in ("call_function", "call_method"):
        return ""
    return str(getattr(node.target, "__name__", node.target))


def _is_plain(node: fx.Node) -> bool:
    """Does the node return tensors only? Others are the state of autocast, or a nested graph."""
    if node.op == "output":
        return True
    value = node.meta.get("example_value")
    values = value if isinstance(value, (tuple, list)) else (value,)
    return all(isinstance(one, Tensor) for one in values)


def keeps_order(nodes: Sequence[fx.Node], units: Sequence[Sequence[fx.Node]]) -> bool:
    """If memory is overwritten, are all its earlier readers in the unit that overwrites it?"""
    unit_of = {node: number for number, unit in enumerate(units) for node in unit}
    for place, node in enumerate(nodes):
        for storage in map(_storage, _written(node)):
            earlier = [one for one in nodes[:place] if _storage(one) == storage]
            readers = {reader for one in earlier for reader in one.users if reader.op != "output"}
            if any(unit_of[reader] != unit_of[node] for reader in readers):
                return False
    return True


def _written(node: fx.Node) -> list[fx.Node]:
    """Returns the inputs that a node overwrites."""
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


def _extract_piece(unit: Sequence[fx.Node]) -> tuple[fx.GraphModule, list[fx.Node], list[fx.Node]]:
    """Returns some nodes of a block's graph as a graph of their own, the nodes that they read, and those read of them.

    Names in the new graph do not depend on where in the block the nodes were, so equal pieces have equal code.
    """
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


def _compile_piece(piece: fx.GraphModule, values: Sequence[Tensor], compile_: Compile) -> Function:
    """Compiles a piece, forward and backward, for tensors like `values`, which are fake.

    Backward recomputes the masks of ReLUs from the activations that norms save. Saved masks would come on top of the
    results that the functions after a piece save.
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
    own_context = torch._guards.tracing(torch._guards.TracingContext(mode))
    settings = {"force_non_lazy_backward_lowering": True, "ban_recompute_materialized_backward": False}
    with own_context, torch._functorch.config.patch(settings):
        return compile_(piece, inputs)


def _assemble(
    module: fx.GraphModule,
    units: Sequence[Sequence[fx.Node]],
    piece_of: Callable[[Sequence[fx.Node]], tuple[nn.Module, list[fx.Node], list[fx.Node]]],
) -> fx.GraphModule:
    """Returns the graph that calls the units. A unit of one function is not compiled: there is nothing to fuse."""
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


def by_kernel(node: fx.Node) -> Mapping[Any, Function]:
    """Returns weft's kernels for the device of the node's result, by the torch function that they replace."""
    value = node.meta.get("example_value")
    if not isinstance(value, Tensor) or value.device.type != "cuda" or not has_triton():
        return {}
    from weft.models.vision import pool_kernel

    return pool_kernel.kernel_pools()
