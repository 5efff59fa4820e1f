"""What a compiled block keeps for backward, and the most that its backward holds: from torch's own partition.

torch.compile traces a block's forward and backward as one graph and cuts it where least has to be kept (a minimal cut;
cheap operations are computed again). Here the same trace and cut are made on fake tensors, with the decompositions that
inductor uses; nothing is compiled, and a block of any size takes a second. The cut does not ask for the device; traced
as on a CPU, attention keeps what flash attention keeps on a GPU. Masks of dropout are counted, though inductor draws
them again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from weft.inspection.functional_call import call_with
from weft.inspection.memory_traffic import FusedTraffic
from weft.parallel.fp8 import traced_as_on_a_gpu
from weft.profile import cast, fake
from weft.profile.parts import TensorForm

NO_TRAFFIC = FusedTraffic()
EXTERNAL = ("attention", "convolution")  # in names of operations that have kernels of their own, as those in -mm


@dataclass(frozen=True)
class Partition:
    """What a block hands from forward to backward: which of the tensors that it was given, and what it made itself, by
    the layer of the block behind which it did. `backward_bytes`: the most in backward, over all of that, but for
    gradients of parameters. `made` are the sizes of what it made, one by one; `moves` what its fused kernels move.
    """

    given: tuple[int, ...]
    behind: Mapping[str, int]
    backward_bytes: int
    made: tuple[int, ...] = ()
    moves: FusedTraffic = NO_TRAFFIC


class _Graphs(NamedTuple):
    forward: fx.Graph
    backward: fx.Graph
    num_results: int  # of the forward; what it keeps for backward comes behind them


def partition(block: nn.Module, args: Any, dtype: torch.dtype | None, matmul: str = "compute") -> Partition:
    """The partition of a block that computes in `dtype`, with the plan's `matmul`, for arguments (args, kwargs) whose
    tensors are `TensorForm`.
    """
    multiplying = traced_as_on_a_gpu(block) if matmul == "fp8" else nullcontext()
    with FakeTensorMode(allow_non_fake_inputs=True), multiplying:
        named = [*block.named_parameters(), *block.named_buffers()]
        state = [cast(fake(tensor), dtype) for _, tensor in named]
        leaves, form = tree_flatten(tree_map(_show, args))
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]

        def run(*tensors: Tensor) -> Any:
            own, given = tensors[: len(named)], tensors[len(named) :]
            filled = dict(enumerate(leaves)) | dict(zip(places, given, strict=True))
            inputs, keywords = tree_unflatten(list(filled.values()), form)
            return call_with(block, dict(zip((name for name, _ in named), own, strict=True)), inputs, keywords)

        graphs = _trace(run, [*state, *(leaves[place] for place in places)], len(named))
    return _read(graphs, [name for name, _ in named])


def _show(leaf: Any) -> Any:
    """A fake tensor of the form that was given."""
    if not isinstance(leaf, TensorForm):
        return leaf
    made = torch.empty_strided(leaf.shape, leaf.stride, dtype=leaf.dtype, device="cpu")
    return made.requires_grad_(leaf.requires_grad)


def _trace(run: Callable[..., Any], tensors: Sequence[Tensor], num_own: int) -> _Graphs:
    """The first `num_own` tensors are there anyway: to keep them costs nothing."""
    import torch._inductor.lowering  # which the decompositions of pools ask
    from torch._functorch.aot_autograd import aot_function  # seconds to import, which eager runs need not wait for
    from torch._functorch.partitioners import min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[_Graphs] = []

    def cut(joint: fx.GraphModule, inputs: Any, **keywords: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
        keywords["static_lifetime_input_indices"] = list(range(num_own))
        forward, backward = min_cut_rematerialization_partition(joint, inputs, compiler="inductor", **keywords)
        found.append(_Graphs(forward.graph, backward.graph, keywords["num_fwd_outputs"]))
        return forward, backward

    def leave(gm: fx.GraphModule, example_inputs: Any) -> Any:  # named as torch passes them
        return gm.forward

    with torch.enable_grad():
        aot_function(run, fw_compiler=leave, bw_compiler=leave, partition_fn=cut, decompositions=select_decomp_table())(
            *tensors
        )
    return found[0]


# --- what is kept


def _read(graphs: _Graphs, names: Sequence[str]) -> Partition:
    """`names` are those of the first inputs, which are the block's own and kept anyway."""
    inputs = {_index(node): node for node in graphs.forward.find_nodes(op="placeholder")}
    own = {_storage(node): names[index] for index, node in inputs.items() if index < len(names)}
    given = {_storage(node): index - len(names) for index, node in inputs.items() if index >= len(names)}
    outputs, gradients = _outputs(graphs.forward), _outputs(graphs.backward)[: len(names)]
    results = {_storage(node) for node in outputs[: graphs.num_results] if isinstance(node, fx.Node)}
    places = _places(graphs.forward, own)
    kept, behind, seen = set[int](), dict[str, int](), {*own, *results, None}
    made: list[int] = []
    for node in outputs[graphs.num_results :]:
        storage = _storage(node)
        if storage in given:
            kept.add(given[storage])
        elif storage not in seen:
            behind[places[node]] = behind.get(places[node], 0) + _bytes(node)
            seen.add(storage)
            made.append(_bytes(node))
    over = most_over(graphs.backward, {*own, *map(_storage, gradients)})
    return Partition(tuple(sorted(kept)), behind, over, tuple(made), _moves(graphs))


def _places(graph: fx.Graph, own: Mapping[int | None, str]) -> dict[fx.Node, str]:
    """For each node the layer behind which it is computed, '' before all: the last whose matrix was multiplied."""
    found, behind = {}, ""
    for node in graph.nodes:
        if _is_external(node):
            matrices = [own[_storage(one)] for one in node.all_input_nodes if _storage(one) in own and _rank(one) > 1]
            behind = matrices[0].rpartition(".")[0] if matrices else behind
        found[node] = behind
    return found


# --- what passes through memory


class _Fused(NamedTuple):
    """One fused kernel: the nodes that it writes, and the storages that it reads."""

    written: list[fx.Node]
    read: set[int | None]


def _moves(graphs: _Graphs) -> FusedTraffic:
    """Selective recompute is fused into backward's kernels, which read most of its inputs anyway: it costs to write
    once more what matmuls and attention read, and to read what backward without it does not.
    """
    forward, sizes = _fused(graphs.forward)
    backward, sizes_behind = _fused(graphs.backward)
    there = {_storage(node) for node in _outputs(graphs.forward)[graphs.num_results :]}
    there |= {_storage(node) for node in graphs.forward.find_nodes(op="placeholder")}
    external = [one for node in graphs.forward.nodes if _is_external(node) for one in node.all_input_nodes]
    multiplied = {_storage(node) for node in external}
    again = again_kernels = 0
    for kernel in forward:
        again += sum(_bytes(node) for node in kernel.written if _storage(node) in multiplied)
        if multiplied & {_storage(node) for node in kernel.written} and kernel.read - there:
            again += sum(sizes[storage] for storage in kernel.read - there)
            again_kernels += 1
    totals = [_fused_bytes(kernels, of) for kernels, of in ((forward, sizes), (backward, sizes_behind))]
    return FusedTraffic(totals[0], len(forward), totals[1], len(backward), again, again_kernels)


def _fused_bytes(kernels: Sequence[_Fused], sizes: Mapping[int | None, int]) -> int:
    written = sum(_bytes(node) for kernel in kernels for node in kernel.written)
    return written + sum(sizes[storage] for kernel in kernels for storage in kernel.read)


def _fused(graph: fx.Graph) -> tuple[list[_Fused], dict[int | None, int]]:
    """All that waits for the same matmul or attention is one kernel, as torch.compile makes it; and storages' bytes."""
    written, reads = _kernels(graph)
    order = {node: place for place, node in enumerate(graph.nodes, start=1)}
    starts: dict[int | None, int] = {}
    found: dict[int, _Fused] = {}
    for node in written:
        ready = max((starts.get(storage, 0) for storage in reads[node]), default=0)
        starts[_storage(node)] = order[node] if _is_external(node) else ready
        if not _is_external(node):
            kernel = found.setdefault(ready, _Fused([], set()))
            kernel.written.append(node)
            kernel.read.update(reads[node])
    for kernel in found.values():
        kernel.read.difference_update(map(_storage, kernel.written))
        kernel.read.discard(None)
    sizes = {_storage(node): _bytes(node) for node in (*graph.find_nodes(op="placeholder"), *written) if _storage(node)}
    return list(found.values()), sizes


# --- what backward holds


def most_over(graph: fx.Graph, ignored: set[int | None]) -> int:
    """The most that a compiled backward holds over what it is given from forward; storages in `ignored` do not count.

    Matmuls, attention and convolutions are kernels with a result in memory; all between them is fused, and in memory is
    only what they read and what the graph gives. What is fused runs as soon as it can, one kernel for all that can at
    the same time; it writes over inputs of the same size that nobody reads again.
    """
    written, reads = _kernels(graph)
    starts: dict[int | None, int] = {}  # storage to when it is there
    order = {node: place * len(graph.nodes) for place, node in enumerate(graph.nodes, start=1)}
    for node in written:
        ready = max((starts.get(storage, 0) for storage in reads[node]), default=0)
        starts[_storage(node)] = order[node] if _is_external(node) else ready + 1  # before the next of its own
    ends: dict[int | None, int] = {}
    for node in written:
        for storage in reads[node]:
            ends[storage] = max(ends.get(storage, 0), starts[_storage(node)])
    given = graph.find_nodes(op="placeholder")
    ends |= {_storage(node): max(order.values()) for node in graph.output_node().all_input_nodes}
    sizes = {_storage(node): _bytes(node) for node in (*given, *written)}
    alive = {*map(_storage, given)} - {*ignored, None}
    tangents = {_storage(node) for node in given if "tangents" in node.name}
    base = sum(sizes[storage] for storage in alive - tangents)
    most = now = sum(sizes[storage] for storage in alive)
    for time in sorted({*starts.values()}):
        made = [_storage(node) for node in written if starts[_storage(node)] == time and _storage(node) not in ignored]
        fused = [node for node in written if _storage(node) in made and not _is_external(node)]
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


def _kernels(graph: fx.Graph) -> tuple[list[fx.Node], dict[fx.Node, set[int | None]]]:
    """The nodes whose storage is really written, the first of each, and the storages that each of them reads."""
    needed = {_storage(node) for node in graph.output_node().all_input_nodes}
    for node in graph.nodes:
        if _is_external(node):
            needed |= {_storage(one) for one in node.all_input_nodes} | {_storage(user) for user in (node, *node.users)}
    there = {_storage(node) for node in graph.find_nodes(op="placeholder")}
    written: list[fx.Node] = []
    reads: dict[fx.Node, set[int | None]] = {}
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        storages = set[int | None]()
        for one in node.all_input_nodes:
            storages |= {_storage(one)} if _storage(one) in there else reads.get(one, set())
        reads[node] = storages
        if _storage(node) in needed and _storage(node) not in there and _storage(node) is not None:
            there.add(_storage(node))
            written.append(node)
    return written, reads


def _is_external(node: fx.Node) -> bool:
    """Whether a node is a kernel of its own, or gives one of its results."""
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
    """The place of an input among all: torch calls them primals_1 and so on."""
    return int(node.name.rpartition("_")[2]) - 1


def _storage(node: Any) -> int | None:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return int(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None


def _bytes(node: fx.Node) -> int:
    return int(node.meta["val"].untyped_storage().nbytes())


def _rank(node: fx.Node) -> int:
    return int(node.meta["val"].dim())
