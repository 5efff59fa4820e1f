"""What a model costs, block by block: parameters, FLOPs, bytes saved for backward. Taken without computing anything.

The chain of blocks is found, not declared: the elements of the outermost `nn.ModuleList`s and `nn.Sequential`s that
hold parameters. What lies outside them (embedding, final norm, head) is the root. FLOPs and saved bytes come from one
forward on fake tensors (shapes only), counted by torch's own FLOP formulas and saved-tensor hooks; a model of any
size takes seconds and no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from weft.blocks import find_blocks, find_units
from weft.cut import Cut
from weft.errors import PlanError
from weft.models.decoder import CausalAttention
from weft.moved import Moved, MovedTally
from weft.pairing import Pairing, is_convolution, is_linear, is_norm, pair
from weft.probe import num_spatial_dims
from weft.substitute import call_with

aten = torch.ops.aten
CUTS_ATTRIBUTE = "_weft_cuts"
STAGES_ATTRIBUTE = "_weft_stages"  # of a stage's model: parameters that other stages hold too
_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
# What selective recompute keeps: results of matmuls, convolutions and attention. The rest is cheap to compute again.
KEPT_OPERATIONS = frozenset(
    [aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default]
    + [getattr(aten, name).default for name in _ATTENTION]
)


@dataclass(frozen=True)
class Parameter:
    """A parameter's name, the shape that this rank holds, and whether it is trained."""

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    cut: Cut | None = None  # where the tensor axes leave each rank a part, of which `shape` is the shape
    stages: tuple[int, ...] = ()  # of a pipeline, where several hold it (tied parameters)
    copy: int = 0  # which of several holders along `pipe` this is

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Block:
    """A unit of the model's chain. Counts are for one forward of the example batch.

    `flops` counts attention in full, as torch's counter does; `attention_flops` is that part of it, which a causal
    mask halves. `saved_bytes` are those that backward needs, by `memory.recompute`, and `saved_behind` the part of them
    that comes behind each linear or convolution and before the next; `moved_behind` are the bytes that pass through
    memory there (see `moved.py`). `in_backward` is false for a block whose output
    needs no gradient: nothing of it is needed again.
    """

    name: str
    parameters: tuple[Parameter, ...]
    calls: int = 1
    in_backward: bool = True
    flops: int = 0
    attention_flops: int = 0
    saved_bytes: Mapping[str, int] | None = None
    saved_behind: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    moved_behind: Mapping[str, Moved] = field(default_factory=dict)

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Layer:
    """A linear, convolution, embedding or norm in one forward of the example batch: features in and out (channels).

    `rows` are the tokens (or pixels) of its output and `in_rows` of its input; `needs_gradient` says whether its input
    has a gradient; `saved_bytes` are what it is the first to save (its input, or nothing); `is_last` is true where its
    block saves nothing for backward behind it.
    """

    rows: int
    in_rows: int
    in_features: int
    out_features: int
    needs_gradient: bool
    saved_bytes: int = 0
    is_last: bool = False
    is_linear: bool = False


@dataclass(frozen=True)
class Heads:
    """One attention in one forward of the example batch."""

    batch: int
    num_heads: int
    num_key_heads: int
    sequence: int
    head_dim: int


class Flops(NamedTuple):
    """Of one forward, and the part of it that is attention."""

    all: int
    attention: int


@dataclass(frozen=True)
class Profile:
    """A model's root and blocks. `batch_mixers` names layers whose result depends on other samples of the batch.

    `layers` are the linears, convolutions, embeddings and norms by name; `stream_numel` is the size of what blocks hand
    on. `units` has FLOPs finer, for blocks and for the parts of the root (embedding, norm, head); the code that follows
    a unit counts for it.
    """

    root: Block
    blocks: tuple[Block, ...]
    buffer_bytes: int = 0
    batch_mixers: tuple[str, ...] = ()
    counted: bool = False
    layers: Mapping[str, Layer] = field(default_factory=dict)
    attentions: Mapping[str, Heads] = field(default_factory=dict)
    stream_numel: int = 0
    units: Mapping[str, Flops] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    example: Callable[[], Any] | None = field(default=None, compare=False, repr=False)
    kept: dict[str, Any] = field(default_factory=dict, compare=False, repr=False)  # what was found out about it

    @property
    def pairing(self) -> Pairing:
        """How the model's linears can be split; raises PlanError where they cannot."""
        if "pairing" not in self.kept:
            assert self.model is not None
            self.kept["pairing"] = pair(self.model)
        found: Pairing = self.kept["pairing"]
        return found

    @property
    def all(self) -> tuple[Block, ...]:
        """Every block, the root first."""
        return (self.root, *self.blocks)

    @property
    def numel(self) -> int:
        """Parameters of the model, tied ones once."""
        return sum(block.numel for block in self.all)

    @property
    def num_trained(self) -> int:
        """Parameters that are trained."""
        return sum(parameter.numel for block in self.all for parameter in block.parameters if parameter.trainable)

    @property
    def flops(self) -> int:
        """FLOPs of one forward of the example batch."""
        return sum(block.flops for block in self.all)


Places = list[tuple[nn.Module, str]]


def find_parameters(model: nn.Module) -> dict[str, dict[str, Places]]:
    """Block name ('' for the root) to parameter name to where it is used; one used by several blocks is the root's."""
    blocks = find_blocks(model)
    owners_of = _find_owners(model, blocks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, Places] = {}
    owners: dict[str, set[str]] = {}
    for module in model.modules():
        for local_name, parameter in module._parameters.items():
            if parameter is not None:
                name = names[id(parameter)]
                places.setdefault(name, []).append((module, local_name))
                owners.setdefault(name, set()).update(owners_of[id(module)])
    result: dict[str, dict[str, Places]] = {"": {}, **{name: {} for name in blocks}}
    for name, at in places.items():
        owner = owners[name]
        result[owner.pop() if len(owner) == 1 else ""][name] = at
    return result


def _find_owners(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[int, set[str]]:
    """Identity of each module to the blocks that hold it ('' for the root): one module may hang in several places."""
    block_names = {id(module): name for name, module in blocks.items()}
    owners: dict[int, set[str]] = {}

    def visit(module: nn.Module, owner: str) -> None:
        owner = block_names.get(id(module), owner)
        if owner not in owners.setdefault(id(module), set()):
            owners[id(module)].add(owner)
            for child in module.children():
                visit(child, owner)

    visit(model, "")
    return owners


def profile(
    model: nn.Module, example: Callable[[], Any] | None = None, finish: Callable[[Any], Any] | None = None
) -> Profile:
    """The profile of a model. `example()` makes the arguments of one forward of a micro-batch, and `finish(output)`
    computes the loss, whose saved bytes count for the root; without an example, or where the forward depends on the
    values of its inputs, only the structure is known (`counted` is false).
    """
    structure = replace(_structure(model), example=example)
    if example is None:
        return structure
    try:
        return count(model, example, finish, structure)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return structure


def _structure(model: nn.Module) -> Profile:
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise PlanError(f"'{name}' is made when the model first runs; run a batch through the model before this")
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = model.__dict__.get(CUTS_ATTRIBUTE, {})
    stages = model.__dict__.get(STAGES_ATTRIBUTE, {})

    def described(name: str) -> Parameter:
        return Parameter(name, shapes[name], trainable[name], cuts.get(name), stages.get(name, ()))

    blocks = [Block(name, tuple(described(key) for key in places)) for name, places in find_parameters(model).items()]
    mixers = tuple(
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Profile(blocks[0], tuple(blocks[1:]), buffer_bytes, mixers, model=model)


def count(
    model: nn.Module,
    example: Callable[[], Any],
    finish: Callable[[Any], Any] | None,
    structure: Profile,
    tally: Tally | None = None,
) -> Profile:
    """A profile with the counts of one forward."""
    tally = tally or Tally()
    with FakeTensorMode(allow_non_fake_inputs=True):
        state = {name: _fake(parameter) for name, parameter in model.named_parameters()}
        state |= {name: _fake(buffer) for name, buffer in model.named_buffers()}
        tally.ignore(state.values())
        with tally.watching(model):
            output = call_with(model, state, example())
            if finish is not None:
                finish(output)
    counted = [
        replace(
            block,
            calls=tally.calls.get(block.name, 1 if not block.name else 0),
            in_backward=tally.in_backward.get(block.name, not block.name),
            flops=tally.flops.get(block.name, 0),
            attention_flops=tally.attention_flops.get(block.name, 0),
            saved_bytes={kind: sum(saved.get(block.name, {}).values()) for kind, saved in tally.saved.items()},
            saved_behind={kind: saved.get(block.name, {}) for kind, saved in tally.saved.items()},
            moved_behind={layer: one for (name, layer), one in tally.moved.by_place.items() if name == block.name},
        )
        for block in structure.all
    ]
    return replace(
        structure,
        root=counted[0],
        blocks=tuple(counted[1:]),
        counted=True,
        layers=tally.layers,
        attentions=tally.attentions,
        stream_numel=tally.stream_numel,
        units=tally.units,
    )


def stage_profile(whole: Profile, model: nn.Module, names: Collection[str], is_first: bool) -> Profile:
    """The profile of a stage: a model that has these units of the whole, with the whole's counts.

    What precedes all layers counts for the first stage.
    """
    structure = _structure(model)
    blocks = {block.name: block for block in whole.blocks}
    inside = tuple(f"{name}." for name in names)

    def is_here(name: str) -> bool:
        return name in names or name.startswith(inside)

    flops = [whole.units[name] for name in names if name not in blocks and name in whole.units]
    behind = {
        kind: {name: size for name, size in saved.items() if is_here(name) or (not name and is_first)}
        for kind, saved in whole.root.saved_behind.items()
    }
    root = replace(
        structure.root,
        flops=sum(one.all for one in flops),
        attention_flops=sum(one.attention for one in flops),
        saved_bytes={kind: sum(saved.values()) for kind, saved in behind.items()} if whole.counted else None,
        saved_behind=behind,
        moved_behind={
            name: one for name, one in whole.root.moved_behind.items() if is_here(name) or (not name and is_first)
        },
    )
    found = tuple(replace(blocks[block.name], parameters=block.parameters) for block in structure.blocks)
    return replace(
        structure,
        root=root,
        blocks=found,
        counted=whole.counted,
        layers={n: layer for n, layer in whole.layers.items() if is_here(n)},
        attentions={n: heads for n, heads in whole.attentions.items() if is_here(n)},
        stream_numel=whole.stream_numel,
    )


class Tally(TorchDispatchMode):
    """Counts FLOPs and saved bytes of each operation for the block that is running. A storage is counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""
        self.unit = ""  # the unit that runs, or ran last
        self.units: dict[str, Flops] = {}
        self.calls: dict[str, int] = {}
        self.in_backward: dict[str, bool] = {}
        self.flops: dict[str, int] = {}
        self.attention_flops: dict[str, int] = {}
        # by policy, block and the layer behind which it was saved
        self.saved: dict[str, dict[str, dict[str, int]]] = {"none": {}, "selective": {}, "full": {}}
        self.layers: dict[str, Layer] = {}
        self.attentions: dict[str, Heads] = {}
        self.stream_numel = 0
        self.moved = MovedTally()
        self._behind = ""
        self._own_bytes = 0
        self._unsaved: list[str] = []  # the layers of this block behind which nothing was saved so far
        self._seen: dict[str, set[int]] = {"none": set(), "selective": set(), "full": set()}
        self._alive: list[Tensor] = []  # a storage's address means something only while it lives

    def ignore(self, tensors: Iterable[Tensor]) -> None:
        """Parameters and buffers are state, not saved bytes."""
        for tensor in tensors:
            for seen in self._seen.values():
                seen.add(tensor.untyped_storage()._cdata)
            self._alive.append(tensor)

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Count while the model runs forward."""
        handles = []
        for name, module in find_units(model).items():
            handles.append(module.register_forward_pre_hook(partial(self._enter_unit, name)))
        for name, module in model.named_modules():  # before those of blocks, which may be such layers themselves
            if _is_product(module) or isinstance(module, nn.Embedding) or is_norm(module):
                handles.append(module.register_forward_pre_hook(self._begin))
                handles.append(module.register_forward_hook(partial(self._measure, name)))
            if isinstance(module, CausalAttention):
                handles.append(module.register_forward_pre_hook(partial(self._measure_heads, name)))
        for name, module in find_blocks(model).items():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        try:
            with self, torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        count = _ATTENTION_FLOPS.get(func._overloadpacket, flop_registry.get(func._overloadpacket))
        if count is not None:
            flops = count(*args, **(kwargs or {}), out_val=result)
            self.flops[self.running] = self.flops.get(self.running, 0) + flops
            attention_flops = flops if func._overloadpacket in _ATTENTION_FLOPS else 0
            self.attention_flops[self.running] = self.attention_flops.get(self.running, 0) + attention_flops
            before = self.units.get(self.unit, Flops(0, 0))
            self.units[self.unit] = Flops(before.all + flops, before.attention + attention_flops)
            self.moved.product((args, kwargs), result)
        else:
            self.moved.operation(func, (args, kwargs), result, (self.running, self._behind))
        if func in KEPT_OPERATIONS:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._add("selective", tensor)
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        self._unsaved.clear()
        self.moved.saved(tensor)
        self._add("none", tensor)
        if not self.running:
            self._add("selective", tensor)
            self._add("full", tensor)
        return tensor

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.running = name
        self._unsaved.clear()
        self.calls[name] = self.calls.get(name, 0) + 1
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.stream_numel = self.stream_numel or tensor.numel()
                self._add("selective", tensor)
                self._add("full", tensor)

    def _begin(self, _: nn.Module, __: Any) -> None:
        self._own_bytes = 0

    def _measure(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        value = args[0]
        dim = -1 - num_spatial_dims(module)
        width, out = 1 if isinstance(module, nn.Embedding) else value.shape[dim], output.shape[dim]
        rows, in_rows = output.numel() // out, value.numel() // width
        self.layers[name] = Layer(
            rows, in_rows, width, out, value.requires_grad, self._own_bytes, is_linear=is_linear(module)
        )
        self._unsaved.append(name)
        if _is_product(module):
            self._behind = name

    def _measure_heads(self, name: str, _: nn.Module, args: Any) -> None:
        query, key = args[0], args[1]
        batch, num_heads, sequence, head_dim = query.shape
        self.attentions[name] = Heads(batch, num_heads, key.shape[1], sequence, head_dim)

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.running = ""
        for last in self._unsaved:
            self.layers[last] = replace(self.layers[last], is_last=True)
        needs = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        self.in_backward[name] = self.in_backward.get(name, False) or needs

    def _add(self, kind: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen[kind]:
            self._seen[kind].add(storage._cdata)
            self._alive.append(tensor)
            self._own_bytes += storage.nbytes() if kind == "none" else 0
            saved = self.saved[kind].setdefault(self.running, {})
            saved[self._behind] = saved.get(self._behind, 0) + storage.nbytes()

    def _enter_unit(self, name: str, *_: Any) -> None:
        self.unit = name


def _is_product(module: nn.Module) -> bool:
    return is_linear(module) or is_convolution(module)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Whole attention, as torch's own counter has it: a causal mask is not discounted. Key heads may be fewer.
    batch, heads, queries, head_dim = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (head_dim + value.shape[-1])


_ATTENTION_FLOPS = {getattr(aten, name): _attention_flops for name in _ATTENTION}


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
