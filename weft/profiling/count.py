"""Counts FLOPs, memory traffic, saved activations and outputs of each block in one forward on fake tensors.

Nothing is computed and no backward runs, so a model of any size takes seconds and no memory. Ranks can still be forked
afterwards (torch's backward starts threads that do not survive a fork). The FLOPs of backward follow from which
operands require gradients. Operations inside an autograd.Function of the model count for forward only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from weft.errors import PlanError
from weft.inspection.attention_interface import watch_attention
from weft.inspection.blocks import find_blocks, find_units
from weft.inspection.callers import CheckpointKind, checkpoint_around, unwrapped
from weft.inspection.chain_ends import hidden_states_of
from weft.inspection.functional_call import call_with, no_fakes_left
from weft.inspection.memory_traffic import TrafficCounter, bytes_of, is_view, tensors_of
from weft.inspection.nested_tensors import map_tensors
from weft.inspection.split_probe import is_convolution, is_linear, num_spatial_dims
from weft.inspection.tensor_splits import is_norm
from weft.models.attention import CausalAttention
from weft.models.loss import is_gradient_work
from weft.models.loss_head import example_labels, returns_loss
from weft.profiling.autograd_graph import leaves_of, nodes_behind
from weft.profiling.branches import DataFlow
from weft.profiling.flops import KEPT_OPERATIONS, count_product
from weft.profiling.fused_attention import attention_of_a_gpu
from weft.profiling.parts import (
    Block,
    Convolution,
    ExpertCall,
    Flops,
    Heads,
    LayerShape,
    Matmul,
    Profile,
    TensorMetadata,
)
from weft.profiling.saved_bytes import POLICIES, SavedTally

NO_FLOPS = Flops()
aten = torch.ops.aten
LOOKUPS = (aten.embedding, aten.index, aten.index_select, aten.gather)
ALLOCATIONS = (aten.empty, aten.empty_like, aten.empty_strided, aten.new_empty, aten.new_empty_strided)
WHOLE_NORMS = (aten.native_batch_norm, aten.native_group_norm)  # each statistic is over a whole image


def count(
    model: nn.Module,
    example: Callable[[], Any],
    finish: Callable[[Any], Any] | None,
    dtype: torch.dtype | None,
    structure: Profile,
    tally: Tally | None = None,
) -> Profile:
    """Returns the profile `structure` with the counts of one forward of the model added.

    `example`, `finish` and `dtype` are those of `weft.profiling.profile`; `tally` is the counter to use.
    """
    tally = tally or Tally()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: cast(fake(parameter), dtype) for name, parameter in model.named_parameters()}
        state |= {name: fake(buffer) for name, buffer in model.named_buffers()}
        tally.saved.ignore(state.values())
        tally.watch_reads(model, state)
        given = tree_map(partial(cast, dtype=dtype), example())  # allocated before the forward
        experts = [layer.name for block in structure.blocks for layer in block.experts]
        with no_fakes_left(model), _explained(model), tally.watching(model, experts):
            with example_labels(model, finish), attention_of_a_gpu():
                output = call_with(model, state, given)
            finished = None if finish is None else finish(output)
    tally.end(tensors_of((output, finished)), state)
    tally.blocks[""].boundary_bytes = sum(map(bytes_of, tensors_of(output)))
    root, *blocks = (tally.counted(block) for block in structure.all)
    units = [name for name in find_units(model) if name in tally.units]
    return replace(
        structure,
        root=replace(root, branches=tally.flow.branches(units)),
        blocks=tuple(blocks),
        counted=True,
        layers=tally.layers,
        layer_calls={name: tuple(calls) for name, calls in tally.layer_calls.items()},
        read_outside=frozenset(tally.read_outside),
        in_stream=tally.in_stream,
        out_of_stream=tally.out_of_stream,
        attentions={name: tuple(calls) for name, calls in tally.attentions.items()},
        expert_calls={name: tuple(calls) for name, calls in tally.expert_calls.items()},
        stream_numel=math.prod(tally.stream_shape) if tally.stream_shape else 0,
        stream_shape=tally.stream_shape,
        units=tally.units,
        checkpoints=tally.checkpoints,
    )


@contextmanager
def _explained(model: nn.Module) -> Iterator[None]:
    """Raise a PlanError where torch refuses the hooks on saved tensors, by which a profile counts saved bytes."""
    try:
        yield
    except RuntimeError as error:
        if "saved tensor hooks" not in str(error):
            raise
        raise PlanError(
            f"the forward of {type(model).__name__} computes gradients by torch.func (grad, vjp, jacrev or hessian), "
            f"where torch lets weft not see what is saved for backward; use torch.autograd.grad with "
            f"create_graph=True instead"
        ) from error


@dataclass
class _Counts:
    """Counts of one block so far."""

    calls: int = 0
    in_backward: bool = False
    needs_gradient: bool = False
    flops: Flops = NO_FLOPS
    read_bytes: int = 0
    written_bytes: int = 0
    boundary_bytes: int = 0
    matmuls: Counter[Matmul] = field(default_factory=Counter)
    convolutions: list[Convolution] = field(default_factory=list)


class Tally(TorchDispatchMode):
    """Counts each operation of a forward for the block that is running ("" is the root)."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""
        self.unit = ""  # the unit that runs, or ran last
        self.units: dict[str, Flops] = {}
        self.blocks: dict[str, _Counts] = {"": _Counts(calls=1, in_backward=True, needs_gradient=True)}
        self.layer_calls: dict[str, list[LayerShape]] = {}
        self.attentions: dict[str, list[Heads]] = {}
        self.expert_calls: dict[str, list[ExpertCall]] = {}
        self.given: dict[str, Any] = {}  # block -> (args, kwargs) of its first call, with `TensorMetadata` for tensors
        self.stream_shape: tuple[int, ...] = ()
        self.in_stream: frozenset[str] = frozenset()
        self.out_of_stream: frozenset[str] = frozenset()
        self._ends: tuple[str, ...] = ()  # the first and the last block
        self._before: set[Any] = set()  # autograd's nodes behind the first block's input
        self._stop: Any = None  # the node that made it
        self._between: set[Any] = set()  # those behind the last block's result, without those before
        self.checkpoints: dict[str, CheckpointKind] = {}  # the user's own, around blocks
        self.saved, self.traffic, self.flow = SavedTally(), TrafficCounter(), DataFlow()
        self.read_outside: set[str] = set()  # parameters of layers that an operation outside of the layer uses
        self._owners: dict[int, tuple[str, set[str]]] = {}  # storage of a parameter -> its name, and its layers
        self._inside = ""  # the layer that runs
        self._last_layer = ""  # the linear or convolution that ran last
        # Every call of a layer, attention or layer of experts: as in `_unsaved`, and what it returned.
        self._calls: list[tuple[list[Any], int, Tensor]] = []
        # Of blocks: the number of `_calls` before, what the stream was before and what was returned.
        self._block_calls: list[tuple[str, int, list[Tensor], list[Tensor]]] = []
        # Calls of this block after which nothing was saved so far: the list that has the call, and its number there.
        self._unsaved: list[tuple[list[Any], int]] = []

    @property
    def layers(self) -> dict[str, LayerShape]:
        """The last call of each layer."""
        return {name: calls[-1] for name, calls in self.layer_calls.items()}

    def counted(self, block: Block) -> Block:
        """Returns the block with its counts added."""
        found, saved = self.blocks.get(block.name, _Counts()), self.saved.by_layer
        inside = [name for name in self.layers if name == block.name or name.startswith(f"{block.name}.")]
        return replace(
            block,
            calls=found.calls,
            in_backward=found.in_backward,
            needs_gradient=found.needs_gradient,
            flops=found.flops.all,
            attention_flops=found.flops.attention,
            backward_flops=found.flops.backward,
            read_bytes=found.read_bytes,
            written_bytes=found.written_bytes,
            boundary_bytes=found.boundary_bytes,
            saved_bytes={policy: sum(saved[policy].get(block.name, {}).values()) for policy in POLICIES},
            saved_by_layer={policy: saved[policy].get(block.name, {}) for policy in POLICIES},
            traffic_by_layer={layer: one for (name, layer), one in self.traffic.by_layer.items() if name == block.name},
            matmuls=dict(found.matmuls),
            convolutions=tuple(found.convolutions),
            branches=self.flow.branches(inside),
            sendable=self.saved.sendable.get(block.name, {}),
        )

    def watch_reads(self, model: nn.Module, state: Mapping[str, Tensor]) -> None:
        """Record which of the parameters in `state` are used outside of the linears and embeddings that hold them."""
        places: dict[str, set[str]] = {}
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        for path, module in model.named_modules():
            if _is_product(module) or isinstance(module, nn.Embedding):
                for parameter in module._parameters.values():
                    if parameter is not None:
                        places.setdefault(names[id(parameter)], set()).add(path)
        self._owners = {state[name].untyped_storage()._cdata: (name, paths) for name, paths in places.items()}

    @contextmanager
    def watching(self, model: nn.Module, experts: Iterable[str]) -> Iterator[None]:
        """Count the operations of the model inside the context. `experts` are the names of its layers of experts."""
        handles, see = [], partial(self._measure_heads, {id(module): name for name, module in model.named_modules()})
        for name, module in find_units(model).items():
            handles.append(module.register_forward_pre_hook(partial(self._enter_unit, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave_node, name)))
        for name, module in model.named_modules():  # before the hooks of blocks: a block may itself be such a layer
            if _is_product(module) or isinstance(module, nn.Embedding) or is_norm(module):
                handles.append(module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True))
                handles.append(module.register_forward_hook(partial(self._measure, name), with_kwargs=True))
            if isinstance(module, CausalAttention):
                handles.append(module.register_forward_pre_hook(lambda inner, args: see(inner, *args)))
        for name in experts:
            measure = partial(self._measure_experts, name)
            handles.append(model.get_submodule(name).register_forward_pre_hook(measure, with_kwargs=True))
            handles.append(model.get_submodule(name).register_forward_hook(partial(self._leave_experts, name)))
        blocks = find_blocks(model)
        self._ends = (*list(blocks)[:1], *list(blocks)[-1:])
        for name, module in blocks.items():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            packing = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
            with self, torch.enable_grad(), packing, watch_attention(see):
                yield
        finally:
            for handle in handles:
                handle.remove()

    # --- operations

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func._overloadpacket is aten.rand and not result.dim():
            result = torch.tensor(0.5)  # layer drop compares it with a rate: no block is skipped here
        inputs, outputs = tensors_of((args, kwargs)), tensors_of(result)
        self.flow.operation(inputs, outputs)
        for tensor in inputs:
            name, owners = self._owners.get(tensor.untyped_storage()._cdata, ("", {self._inside}))
            if self._inside not in owners and torch._C._current_graph_task_id() == -1:  # not in a backward of autograd
                self.read_outside.add(name)
        here, found = self.blocks[self.running], count_product(func, args, kwargs, result)
        if found is not None and is_gradient_work():
            later = Flops(backward=found.flops.all)
            here.flops = here.flops.plus(later)
            self.units[self.unit] = self.units.get(self.unit, NO_FLOPS).plus(later)
            return result
        if found is not None:
            here.flops = here.flops.plus(found.flops)
            self.units[self.unit] = self.units.get(self.unit, NO_FLOPS).plus(found.flops)
            here.matmuls.update([found.matmul] if found.matmul is not None else [])
            here.convolutions += [found.convolution] if found.convolution is not None else []
            self.traffic.product(inputs, outputs)
        elif func._overloadpacket in ALLOCATIONS:
            return result
        elif not is_view(func, inputs, outputs):
            reads_twice = func._overloadpacket in WHOLE_NORMS
            self.traffic.operation(inputs, outputs, (self.running, self._last_layer), reads_twice)
        else:
            return result
        here.read_bytes += sum(map(bytes_of, inputs))
        if func._overloadpacket in LOOKUPS:  # of the table, only the elements of the output are read
            here.read_bytes -= max(0, bytes_of(inputs[0]) - sum(map(bytes_of, outputs)))
        here.written_bytes += sum(map(bytes_of, outputs))
        if func in KEPT_OPERATIONS and self.running:  # the root is not recomputed: it keeps what autograd saves
            for tensor in outputs:
                self._save(tensor, "selective")
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        self._unsaved.clear()
        self.traffic.saved(tensor)
        self._save(tensor, *(["none"] if self.running else POLICIES))
        return tensor

    def _save(self, tensor: Tensor, *policies: str) -> None:
        self.saved.add(policies, tensor, self.running, self._last_layer)

    def end(self, results: list[Tensor], state: Mapping[str, Tensor]) -> None:
        """Find on which parameters in `state` values between the first and the last block depend, and all others."""
        names = {id(tensor): name for name, tensor in state.items()}
        outside = self._before | nodes_behind(results, {node for node in self._between if node.next_functions})
        self.in_stream, self.out_of_stream = (
            frozenset(names[id(leaf)] for leaf in leaves_of(nodes) if id(leaf) in names)
            for nodes in (self._between, outside)
        )
        self._leave_out(nodes_behind(results))
        self._before, self._stop, self._between = set(), None, set()

    def _leave_out(self, alive: set[Any]) -> None:
        """Set which calls backward passes, if it passes the nodes `alive` of autograd's graph.

        If it seems to pass none, the results are in objects that weft does not look into, and all are taken to be used.
        """

        def is_used(tensor: Tensor) -> bool:
            return not alive or tensor.grad_fn is None or tensor.grad_fn in alive

        ends, used = [*(first for _, first, _, _ in self._block_calls[1:]), len(self._calls)], set()
        for (name, first, given, made), end in zip(self._block_calls, ends, strict=False):
            trained = [tensor for tensor in made if tensor.requires_grad]
            if any(map(is_used, trained)):
                used.add(name)
                self.blocks[name].needs_gradient |= any(tensor.requires_grad and is_used(tensor) for tensor in given)
            elif trained:  # nor is it computed again
                for calls, number, _ in self._calls[first:end]:
                    calls[number] = replace(calls[number], is_last=True)
        for name, found in self.blocks.items():
            found.in_backward = name in used or not name
        for calls, number, tensor in self._calls:
            if not is_used(tensor):
                backward = {} if isinstance(calls[number], Heads) else {"in_backward": False}
                calls[number] = replace(calls[number], needs_gradient=False, **backward)
        self._calls, self._block_calls = [], []

    # --- units and blocks

    def _enter_unit(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.unit = name
        self.units.setdefault(name, NO_FLOPS)
        self.flow.enter(name, tensors_of((args, kwargs)))

    def _leave_node(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.flow.leave(name, tensors_of(output))

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.running = name
        self._unsaved.clear()
        self.blocks.setdefault(name, _Counts()).calls += 1
        if kind := checkpoint_around():
            self.checkpoints[name] = kind
        self.given.setdefault(name, map_tensors(_form, (args, kwargs)))
        hidden = hidden_states_of(args, kwargs)
        self._block_calls.append((name, len(self._calls), [] if hidden is None else [hidden], []))
        if hidden is not None and name in self._ends[:1] and self.blocks[name].calls == 1:
            self._before, self._stop = nodes_behind([hidden]), hidden.grad_fn
        given = tensors_of((args, kwargs))
        self.saved.stay(given[1:])  # tables and masks, which every block gets
        for tensor in given:
            self.stream_shape = self.stream_shape or tuple(tensor.shape)
            self._save(tensor, "selective", "full")

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.running = ""
        for calls, number in self._unsaved:
            calls[number] = replace(calls[number], is_last=True)
        tensors = tensors_of(output)
        self._block_calls[-1][3].extend(tensors)
        self.blocks[name].boundary_bytes = sum(map(bytes_of, tensors))
        if name in self._ends[1:]:
            self._between |= nodes_behind(tensors[:1], {self._stop})

    # --- layers

    def _begin(self, name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.saved.since = 0
        self._inside = name
        if _is_product(module):
            self.flow.enter(name, tensors_of((args, kwargs)))
        if returns_loss(module):
            self._last_layer = name

    def _measure(self, name: str, module: nn.Module, args: Any, kwargs: Any, output: Tensor) -> None:
        self._inside = ""
        given, output = tensors_of((args, kwargs)), unwrapped(output)
        value = given[0] if given else output[..., 0]  # positions may be given as a length
        dim = -1 - num_spatial_dims(module)
        width = 1 if isinstance(module, nn.Embedding) else value.shape[dim]
        in_rows = value.numel() // width
        weight: Any = getattr(module, "weight", None)  # some norms have none
        out = output.shape[dim] if output.dim() else len(weight)  # a head that returns a loss has no dims
        rows = output.numel() // out if output.dim() else in_rows
        calls = self.layer_calls.setdefault(name, [])
        self._unsaved.append((calls, len(calls)))
        needs_gradient = value.requires_grad and torch.is_grad_enabled()
        shape = LayerShape(rows, in_rows, width, out, needs_gradient, self.saved.since, is_linear=is_linear(module))
        calls.append(replace(shape, in_backward=torch.is_grad_enabled()))
        self._calls.append((calls, len(calls) - 1, output))
        if _is_product(module):
            self._last_layer = name
            self.flow.leave(name, [output])

    def _measure_heads(
        self, names: Mapping[int, str], module: nn.Module, query: Tensor, key: Tensor, value: Tensor
    ) -> None:
        batch, num_heads, sequence, head_dim = query.shape
        needs_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
        heads = Heads(batch, num_heads, key.shape[1], sequence, max(head_dim, value.shape[-1]), needs_gradient)
        calls = self.attentions.setdefault(names[id(module)], [])
        self._unsaved.append((calls, len(calls)))
        calls.append(heads)
        self._calls.append(
            (calls, len(calls) - 1, next((one for one in (query, key, value) if one.requires_grad), query))
        )

    def _measure_experts(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        rows = next((tensor for tensor in tensors_of((args, kwargs)) if tensor.is_floating_point()), None)
        if rows is None or not rows.dim():
            return
        in_backward, calls = torch.is_grad_enabled(), self.expert_calls.setdefault(name, [])
        self._unsaved.append((calls, len(calls)))
        calls.append(ExpertCall(rows.numel() // rows.shape[-1], in_backward and rows.requires_grad, in_backward))

    def _leave_experts(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        calls = self.expert_calls.get(name, [])
        self._calls += [(calls, len(calls) - 1, tensor) for tensor in tensors_of(output)[:1]] if calls else []


def _is_product(module: nn.Module) -> bool:
    return is_linear(module) or is_convolution(module)


def _form(tensor: Tensor) -> TensorMetadata:
    value = unwrapped(tensor)
    storage = value.untyped_storage()
    form = tuple(value.shape), value.stride(), value.dtype, value.requires_grad
    return TensorMetadata(*form, storage._cdata, storage.nbytes())


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Returns a floating-point tensor as a leaf of another dtype; any other value unchanged."""
    if dtype is None or not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    return value.detach().to(dtype).requires_grad_(value.requires_grad)


def fake(tensor: Tensor) -> Tensor:
    """Returns an empty CPU tensor of the same shape and dtype. Call it inside a FakeTensorMode."""
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
