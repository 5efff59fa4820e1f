"""What a model costs, block by block: parameters, FLOPs, bytes saved for backward. Taken without computing anything.

The chain of blocks is found, not declared: the elements of the outermost `nn.ModuleList`s and `nn.Sequential`s that
hold parameters. What lies outside them (embedding, final norm, head) is the root. FLOPs and saved bytes come from one
forward on fake tensors (shapes only), counted by torch's own FLOP formulas and saved-tensor hooks; a model of any
size takes seconds and no memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from weft.blocks import find_blocks, find_units
from weft.cut import Cut
from weft.models.decoder import CausalAttention
from weft.pairing import Pairing, is_linear, is_norm, pair
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
    mask halves. `saved_bytes` are those that backward needs, by `memory.recompute`. `in_backward` is false for a block
    whose output needs no gradient: nothing of it is needed again.
    """

    name: str
    parameters: tuple[Parameter, ...]
    calls: int = 1
    in_backward: bool = True
    flops: int = 0
    attention_flops: int = 0
    saved_bytes: Mapping[str, int] | None = None

    @property
    def numel(self) -> int:
        """How many parameters it has."""
        return sum(parameter.numel for parameter in self.parameters)


@dataclass(frozen=True)
class Layer:
    """A linear, embedding or norm in one forward of the example batch: rows (tokens), features in and out.

    `is_last` is true for the last linear that its block calls; `needs_gradient` says whether its input has one.
    """

    rows: int
    in_features: int
    out_features: int
    needs_gradient: bool
    is_last: bool = False


@dataclass(frozen=True)
class Heads:
    """One attention in one forward of the example batch."""

    batch: int
    num_heads: int
    num_key_heads: int
    sequence: int
    head_dim: int


@dataclass(frozen=True)
class Counts:
    """What a unit does in one forward; see Block."""

    flops: int = 0
    attention_flops: int = 0
    saved_bytes: Mapping[str, int] = field(default_factory=dict)

    def __add__(self, other: Counts) -> Counts:
        saved = Counter(self.saved_bytes) + Counter(other.saved_bytes)
        return Counts(self.flops + other.flops, self.attention_flops + other.attention_flops, saved)


@dataclass(frozen=True)
class Profile:
    """A model's root and blocks. `batch_mixers` names layers whose result depends on other samples of the batch.

    `layers` are the linears, embeddings and norms by name; `stream_numel` is the size of what blocks hand on. `units`
    has the same counts finer, for blocks and for the parts of the root (embedding, norm, head); the code that follows a
    unit counts for it.
    """

    root: Block
    blocks: tuple[Block, ...]
    buffer_bytes: int = 0
    batch_mixers: tuple[str, ...] = ()
    counted: bool = False
    layers: Mapping[str, Layer] = field(default_factory=dict)
    attentions: Mapping[str, Heads] = field(default_factory=dict)
    stream_numel: int = 0
    units: Mapping[str, Counts] = field(default_factory=dict)
    model: nn.Module | None = field(default=None, compare=False, repr=False)
    example: Callable[[], Any] | None = field(default=None, compare=False, repr=False)

    @cached_property
    def pairing(self) -> Pairing:
        """How the model's linears can be split; raises PlanError where they cannot."""
        assert self.model is not None
        return pair(self.model)

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
        return _count(model, example, finish, structure)
    except (DataDependentOutputException, DynamicOutputShapeException):
        return structure


def _structure(model: nn.Module) -> Profile:
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = model.__dict__.get(CUTS_ATTRIBUTE, {})
    stages = model.__dict__.get(STAGES_ATTRIBUTE, {})

    def parameter(name: str) -> Parameter:
        return Parameter(name, shapes[name], trainable[name], cuts.get(name), stages.get(name, ()))

    blocks = [Block(name, tuple(parameter(key) for key in places)) for name, places in find_parameters(model).items()]
    mixers = tuple(
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Profile(blocks[0], tuple(blocks[1:]), buffer_bytes, mixers, model=model)


def _count(
    model: nn.Module, example: Callable[[], Any], finish: Callable[[Any], Any] | None, structure: Profile
) -> Profile:
    tally = _Tally()
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
            saved_bytes={kind: tally.saved[kind].get(block.name, 0) for kind in tally.saved},
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


def stage_profile(whole: Profile, model: nn.Module, names: Collection[str]) -> Profile:
    """The profile of a stage: a model that has these units of the whole, with the whole's counts."""
    structure = _structure(model)
    blocks = {block.name: block for block in whole.blocks}
    inner = sum((whole.units.get(n, Counts()) for n in names if n not in blocks), Counts())
    kinds = dict.fromkeys(("none", "selective", "full"), 0)
    root = replace(
        structure.root,
        flops=inner.flops,
        attention_flops=inner.attention_flops,
        saved_bytes={**kinds, **inner.saved_bytes} if whole.counted else None,
    )
    found = tuple(replace(blocks[block.name], parameters=block.parameters) for block in structure.blocks)
    inside = tuple(f"{name}." for name in names)
    return replace(
        structure,
        root=root,
        blocks=found,
        counted=whole.counted,
        layers={n: layer for n, layer in whole.layers.items() if n in names or n.startswith(inside)},
        attentions={n: heads for n, heads in whole.attentions.items() if n.startswith(inside)},
        stream_numel=whole.stream_numel,
    )


class _Tally(TorchDispatchMode):
    """Counts FLOPs and saved bytes of each operation for the block that is running. A storage is counted once."""

    def __init__(self) -> None:
        super().__init__()
        self.running = ""
        self.unit = ""  # the unit that runs, or ran last
        self.units: dict[str, Counts] = {}
        self.calls: dict[str, int] = {}
        self.in_backward: dict[str, bool] = {}
        self.flops: dict[str, int] = {}
        self.attention_flops: dict[str, int] = {}
        self.saved: dict[str, dict[str, int]] = {"none": {}, "selective": {}, "full": {}}
        self.layers: dict[str, Layer] = {}
        self.attentions: dict[str, Heads] = {}
        self.stream_numel = 0
        self._last_linear = ""
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
        for name, module in find_blocks(model).items():
            handles.append(module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True))
            handles.append(module.register_forward_hook(partial(self._leave, name)))
        for name, module in find_units(model).items():
            handles.append(module.register_forward_pre_hook(partial(self._enter_unit, name)))
        for name, module in model.named_modules():
            if is_linear(module) or isinstance(module, nn.Embedding) or is_norm(module):
                handles.append(module.register_forward_hook(partial(self._measure, name)))
            if isinstance(module, CausalAttention):
                handles.append(module.register_forward_pre_hook(partial(self._measure_heads, name)))
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
            self._count(Counts(flops, attention_flops))
        if func in KEPT_OPERATIONS:
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor):
                    self._add("selective", tensor)
        return result

    def _pack(self, tensor: Tensor) -> Tensor:
        self._add("none", tensor)
        if not self.running:
            self._add("selective", tensor)
            self._add("full", tensor)
        return tensor

    def _enter(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> None:
        self.running = name
        self.calls[name] = self.calls.get(name, 0) + 1
        for tensor in tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor):
                self.stream_numel = self.stream_numel or tensor.numel()
                self._add("selective", tensor)
                self._add("full", tensor)

    def _measure(self, name: str, module: nn.Module, args: Any, output: Tensor) -> None:
        value = args[0]
        width = 1 if isinstance(module, nn.Embedding) else value.shape[-1]
        out = output.shape[-1]
        self.layers[name] = Layer(value.numel() // width, width, out, value.requires_grad)
        if is_linear(module):
            self._last_linear = name

    def _measure_heads(self, name: str, _: nn.Module, args: Any) -> None:
        query, key = args[0], args[1]
        batch, num_heads, sequence, head_dim = query.shape
        self.attentions[name] = Heads(batch, num_heads, key.shape[1], sequence, head_dim)

    def _leave(self, name: str, _: nn.Module, __: Any, output: Any) -> None:
        self.running = ""
        if self._last_linear in self.layers:
            self.layers[self._last_linear] = replace(self.layers[self._last_linear], is_last=True)
        needs = any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in tree_leaves(output))
        self.in_backward[name] = self.in_backward.get(name, False) or needs

    def _add(self, kind: str, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._seen[kind]:
            self._seen[kind].add(storage._cdata)
            self._alive.append(tensor)
            self.saved[kind][self.running] = self.saved[kind].get(self.running, 0) + storage.nbytes()
            self._count(Counts(saved_bytes={kind: storage.nbytes()}))

    def _enter_unit(self, name: str, *_: Any) -> None:
        self.unit = name

    def _count(self, more: Counts) -> None:
        self.units[self.unit] = self.units.get(self.unit, Counts()) + more


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    # Whole attention, as torch's own counter has it: a causal mask is not discounted. Key heads may be fewer.
    batch, heads, queries, head_dim = query.shape
    return 2 * batch * heads * queries * key.shape[-2] * (head_dim + value.shape[-1])


_ATTENTION_FLOPS = {getattr(aten, name): _attention_flops for name in _ATTENTION}


def _fake(tensor: Tensor) -> Tensor:
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return made.requires_grad_(tensor.requires_grad)
