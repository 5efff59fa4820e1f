"""Activations that a compiled block saves, and the peak memory of its backward, from torch's own partitioner.

torch.compile traces a block's forward and backward as one graph, and cuts it where the fewest bytes have to be saved (a
minimum cut; cheap operations are recomputed). This file makes the same trace and cut on fake tensors, with inductor's
decompositions. Nothing is compiled, and a block of any size takes a second. The cut does not depend on the device:
traced on a CPU, attention saves what flash attention saves on a GPU. Masks of dropout are counted, although inductor
recomputes them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib import import_module
from operator import getitem
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from weft.inspection.functional_call import call_with
from weft.inspection.memory_traffic import FusedTraffic
from weft.parallel.fp8.matmuls import traced_as_on_a_gpu
from weft.profiling import cast, fake
from weft.profiling.fused_attention import attention_of_a_gpu
from weft.profiling.parts import TensorMetadata

NO_TRAFFIC = FusedTraffic()
EXTERNAL = ("attention", "convolution")  # in names of operations with a library's kernel; names in -mm are others


@dataclass(frozen=True)
class Partition:
    """The tensors that a compiled block saves for backward.

    `saved_inputs`: indices of the input tensors that are saved. `saved_by_layer`: bytes of other saved tensors, by the
    layer of the block after which they are computed. `saved_sizes`: the bytes of each of these. `backward_bytes`: the
    peak of backward above all saved tensors, without gradients of parameters. `traffic`: the memory traffic of its
    fused kernels.
    """

    saved_inputs: tuple[int, ...]
    saved_by_layer: Mapping[str, int]
    backward_bytes: int
    saved_sizes: tuple[int, ...] = ()
    traffic: FusedTraffic = NO_TRAFFIC


class _Graphs(NamedTuple):
    forward: fx.Graph
    backward: fx.Graph
    num_results: int  # of the forward's outputs, which come first; the others are saved for backward


def partition(
    block: nn.Module, args: Any, dtype: torch.dtype | None, matmul: str = "compute", sends_rows: bool = False
) -> Partition:
    """Returns the partition of a block that computes in `dtype` with the plan's `matmul`.

    `args` are its arguments (args, kwargs), with `TensorMetadata` for tensors. `sends_rows`: experts in fp8 are on
    several ranks.
    """
    multiplying = traced_as_on_a_gpu(block, sends_rows) if matmul == "fp8" else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), multiplying, attention_of_a_gpu():
        named = [*block.named_parameters(), *block.named_buffers()]
        state = [cast(fake(tensor), dtype) for _, tensor in named]
        leaves, form = tree_flatten(tree_map(_fake_tensor, args))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def run(*tensors: Tensor) -> Any:
            own, given = tensors[: len(named)], tensors[len(named) :]
            filled = dict(enumerate(leaves)) | dict(zip(places, given, strict=True))
            inputs, keywords = tree_unflatten(list(filled.values()), form)
            return call_with(block, dict(zip((name for name, _ in named), own, strict=True)), inputs, keywords)

        if any(leaves[place].dim() > 3 for place in places):  # images
            import_module("torch._inductor.lowering")  # needed by decompositions of pools; takes a second
        graphs = _trace(run, [*state, *(leaves[place] for place in places)], len(named))
    return _read(graphs, [name for name, _ in named])


def _fake_tensor(leaf: Any) -> Any:
    """Returns a fake tensor of the given shape, stride and dtype; any other value unchanged."""
    if not isinstance(leaf, TensorMetadata):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad)


def _trace(run: Callable[..., Any], tensors: Sequence[Tensor], num_own: int) -> _Graphs:
    """Returns the forward and backward graphs. Saving one of the first `num_own` tensors (parameters) costs nothing."""
    from torch._functorch import config
    from torch._functorch.aot_autograd import aot_function  # takes seconds to import, and eager runs do not need it
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[_Graphs] = []

    def cut(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        keywords["static_lifetime_input_indices"] = list(range(num_own))
        merged = config.patch(cse=False) if merge_equal_nodes(joint.graph) else nullcontext()
        with merged:
            forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **keywords)
        found.append(_Graphs(forward.graph, backward.graph, keywords["num_fwd_outputs"]))
        return forward, backward

    def keep_graph(gm: fx.GraphModule, example_inputs: Any) -> Any:  # torch passes them by these names
        return gm.forward

    with torch.enable_grad():
        aot_function(
            run, fw_compiler=keep_graph, bw_compiler=keep_graph, partition_fn=cut, decompositions=select_decomp_table()
        )(*tensors)
    return found[0]


def merge_equal_nodes(graph: fx.Graph) -> bool:
    """Replaces each node of a graph by the first node with the same function and arguments: common subexpressions.

    torch.compile does this before it cuts a graph into forward and backward. Its own pass gives the same graph, but
    first imports all kernels of inductor, which takes longer than the trace of a block. Random functions, `empty` and
    nodes that share memory with a result of the graph stay. Returns False, and changes nothing, if a function of the
    graph writes to its arguments.
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


# --- saved tensors


def _read(graphs: _Graphs, names: Sequence[str]) -> Partition:
    """Returns the partition of two graphs. `names` are those of the first inputs: parameters and buffers."""
    inputs = {_index(node): node for node in graphs.forward.find_nodes(op="placeholder")}
    own = {storage_of(node): names[index] for index, node in inputs.items() if index < len(names)}
    given = {storage_of(node): index - len(names) for index, node in inputs.items() if index >= len(names)}
    outputs, gradients = _outputs(graphs.forward), _outputs(graphs.backward)[: len(names)]
    results = {storage_of(node) for node in outputs[: graphs.num_results] if isinstance(node, fx.Node)}
    layers = _layers_of(graphs.forward, own)
    saved_inputs, saved_by_layer, seen = set[int](), dict[str, int](), {*own, *results, None}
    saved_sizes: list[int] = []
    for node in outputs[graphs.num_results :]:
        storage = storage_of(node)
        if storage in given:
            saved_inputs.add(given[storage])
        elif storage not in seen:
            saved_by_layer[layers[node]] = saved_by_layer.get(layers[node], 0) + _bytes(node)
            seen.add(storage)
            saved_sizes.append(_bytes(node))
    peak_bytes = backward_peak_bytes(graphs.backward, {*own, *map(storage_of, gradients)})
    return Partition(
        tuple(sorted(saved_inputs)), saved_by_layer, peak_bytes, tuple(saved_sizes), _fused_traffic(graphs)
    )


def _layers_of(graph: fx.Graph, own: Mapping[int | None, str]) -> dict[fx.Node, str]:
    """Returns for each node the last layer whose matrix was multiplied before it; '' before all layers."""
    layers, layer = {}, ""
    for node in graph.nodes:
        if _is_external(node):
            matrices = [
                own[storage_of(one)]
                for one in node.all_input_nodes
                if storage_of(one) in own and one.meta["val"].dim() > 1
            ]
            layer = matrices[0].rpartition(".")[0] if matrices else layer
        layers[node] = layer
    return layers


# --- memory traffic


class _FusedKernel(NamedTuple):
    """One fused kernel: the nodes that it writes, and the storages that it reads."""

    written: list[fx.Node]
    read: set[int | None]


def _fused_traffic(graphs: _Graphs) -> FusedTraffic:
    """Returns the memory traffic of the fused kernels.

    Selective recompute is fused into backward's kernels, which read most of its inputs anyway. Its traffic is writing
    the inputs of matmuls and attention again, and reading tensors that backward would not read without it.
    """
    forward, sizes = _fused_kernels(graphs.forward)
    backward, backward_sizes = _fused_kernels(graphs.backward)
    there = {storage_of(node) for node in _outputs(graphs.forward)[graphs.num_results :]}
    there |= {storage_of(node) for node in graphs.forward.find_nodes(op="placeholder")}
    external = [one for node in graphs.forward.nodes if _is_external(node) for one in node.all_input_nodes]
    multiplied = {storage_of(node) for node in external}
    again = again_kernels = 0
    for kernel in forward:
        again += sum(_bytes(node) for node in kernel.written if storage_of(node) in multiplied)
        if multiplied & {storage_of(node) for node in kernel.written} and kernel.read - there:
            again += sum(sizes[storage] for storage in kernel.read - there)
            again_kernels += 1
    totals = [_fused_bytes(kernels, of) for kernels, of in ((forward, sizes), (backward, backward_sizes))]
    return FusedTraffic(totals[0], len(forward), totals[1], len(backward), again, again_kernels)


def _fused_bytes(kernels: Sequence[_FusedKernel], sizes: Mapping[int | None, int]) -> int:
    written = sum(_bytes(node) for kernel in kernels for node in kernel.written)
    return written + sum(sizes[storage] for kernel in kernels for storage in kernel.read)


def _fused_kernels(graph: fx.Graph) -> tuple[list[_FusedKernel], dict[int | None, int]]:
    """Returns the fused kernels of a graph, and the bytes of its storages.

    Operations that wait for the same matmul or attention are one kernel, as in torch.compile.
    """
    written, reads = _written_nodes(graph)
    order = {node: place for place, node in enumerate(graph.nodes, start=1)}
    starts: dict[int | None, int] = {}
    found: dict[int, _FusedKernel] = {}
    for node in written:
        ready = max((starts.get(storage, 0) for storage in reads[node]), default=0)
        starts[storage_of(node)] = order[node] if _is_external(node) else ready
        if not _is_external(node):
            kernel = found.setdefault(ready, _FusedKernel([], set()))
            kernel.written.append(node)
            kernel.read.update(reads[node])
    for kernel in found.values():
        kernel.read.difference_update(map(storage_of, kernel.written))
        kernel.read.discard(None)
    sizes = {
        storage_of(node): _bytes(node) for node in (*graph.find_nodes(op="placeholder"), *written) if storage_of(node)
    }
    return list(found.values()), sizes


# --- the memory of backward


def backward_peak_bytes(graph: fx.Graph, ignored: set[int | None]) -> int:
    """Returns the peak bytes of a compiled backward above its saved tensors; storages in `ignored` do not count.

    Matmuls, attention and convolutions are kernels whose result is in memory. Operations between them are fused: only
    tensors that such a kernel reads, and results of the graph, are in memory. Fused operations run as soon as they can,
    in one kernel for all that can run at the same time. They overwrite inputs of the same size that have no later
    reader.
    """
    written, reads = _written_nodes(graph)
    starts: dict[int | None, int] = {}  # storage -> time at which it is written
    order = {node: place * len(graph.nodes) for place, node in enumerate(graph.nodes, start=1)}
    for node in written:
        ready = max((starts.get(storage, 0) for storage in reads[node]), default=0)
        # A fused kernel runs before the next kernel of a library.
        starts[storage_of(node)] = order[node] if _is_external(node) else ready + 1
    ends: dict[int | None, int] = {}
    for node in written:
        for storage in reads[node]:
            ends[storage] = max(ends.get(storage, 0), starts[storage_of(node)])
    given = graph.find_nodes(op="placeholder")
    ends |= {storage_of(node): max(order.values()) for node in graph.output_node().all_input_nodes}
    sizes = {storage_of(node): _bytes(node) for node in (*given, *written)}
    alive = {*map(storage_of, given)} - {*ignored, None}
    tangents = {storage_of(node) for node in given if "tangents" in node.name}
    base = sum(sizes[storage] for storage in alive - tangents)
    most = now = sum(sizes[storage] for storage in alive)
    for time in sorted({*starts.values()}):
        made = [
            storage_of(node) for node in written if starts[storage_of(node)] == time and storage_of(node) not in ignored
        ]
        fused = [node for node in written if storage_of(node) in made and not _is_external(node)]
        dying = sorted(sizes[storage] for storage in alive if ends.get(storage, 0) <= time)
        over = 0
        for node in fused:
            if _bytes(node) in dying:
                dying.remove(_bytes(node))
                over += _bytes(node)
        now += sum(sizes[storage] for storage in made)
        most = max(most, now - over)
        alive |= {*made}
        gone = {storage for storage in alive if ends.get(storage, 0) <= time}
        now -= sum(sizes[storage] for storage in gone)
        alive -= gone
    return most - base


def _written_nodes(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, set[int | None]]]:
    """Returns the first node of each storage that is written to memory, and the storages that each node reads."""
    needed = {storage_of(node) for node in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if _is_external(node):
            needed |= {storage_of(one) for one in node.all_input_nodes} | {
                storage_of(user) for user in (node, *node.users)
            }
    there = {storage_of(node) for node in graph.find_nodes(op="placeholder")}
    written: list[fx.Node] = []
    reads: dict[fx.Node, set[int | None]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        storages = set[int | None]()
        for one in node.all_input_nodes:
            storages |= {storage_of(one)} if storage_of(one) in there else reads.get(one, set())
        reads[node] = storages
        if storage_of(node) in needed and storage_of(node) not in there and storage_of(node) is not None:
            there.add(storage_of(node))
            written.append(node)
    return written, reads


def _is_external(node: fx.Node) -> bool:
    """Is a node a kernel that is not fused (matmul, attention, convolution), or one of the results of such a kernel?"""
    if node.op != "call_function":
        return False
    if getattr(node.target, "__name__", "") == "getitem":
        return _is_external(node.args[0])  # type: ignore[arg-type]
    packet = str(getattr(node.target, "overloadpacket", node.target)).rpartition(".")
    is_ours = packet[0].partition(".")[0] in ("aten", "prims")
    return not is_ours or packet[2].endswith("mm") or any(name in packet[2] for name in EXTERNAL)


def _outputs(graph: fx.Graph) -> list[Any]:
    return list(graph.output_node().args[0])  # type: ignore[arg-type]


def _index(node: fx.Node) -> int:
    """Returns the index of an input node from its name: torch calls them primals_1, primals_2, ..."""
    return int(node.name.rpartition("_")[2]) - 1


def _bytes(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())
