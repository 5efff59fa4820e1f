"""The part of a profile that needs no forward: blocks, their parameters and experts. Also the profile of a stage."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace

from torch import nn

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import find_blocks
from weft.inspection.parameter_cut import Cut
from weft.models.experts import SparseMLP
from weft.profiling.parts import Block, Experts, Parameter, Profile

# On a model that the tensor axes split: this rank's part of each parameter, by name.
PARAMETER_CUTS = Annotation[Mapping[str, Cut]]("parameter_cuts")
# On a stage's model: the stages of each parameter that several stages hold, by name.
SHARED_BY_STAGES = Annotation[Mapping[str, tuple[int, ...]]]("shared_by_stages")
# Attribute names of configs and routers for the number of experts that each token is sent to.
PER_TOKEN_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k",
    "top_k_experts",
    "moe_top_k",
)

ParameterUses = list[tuple[nn.Module, str]]


def find_parameters(model: nn.Module) -> dict[str, dict[str, ParameterUses]]:
    """Returns for each block ('' for the root) its parameters by name, with the (module, attribute)s that use them.

    A parameter that several blocks use belongs to the root.
    """
    blocks = find_blocks(model)
    owners_of = _find_owners(model, blocks)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    places: dict[str, ParameterUses] = {}
    owners: dict[str, set[str]] = {}
    for module in model.modules():
        for local_name, parameter in module._parameters.items():
            if parameter is not None:
                name = names[id(parameter)]
                places.setdefault(name, []).append((module, local_name))
                owners.setdefault(name, set()).update(owners_of[id(module)])
    result: dict[str, dict[str, ParameterUses]] = {"": {}, **{name: {} for name in blocks}}
    for name, at in places.items():
        owner = owners[name]
        result[owner.pop() if len(owner) == 1 else ""][name] = at
    return result


def _find_owners(model: nn.Module, blocks: Mapping[str, nn.Module]) -> dict[int, set[str]]:
    """Returns, by the id of each module, the blocks that contain it ('' for the root). There may be several."""
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


def structure(model: nn.Module) -> Profile:
    """Returns the profile of a model without counts."""
    for name, parameter in model.named_parameters():
        if nn.parameter.is_lazy(parameter):
            raise PlanError(f"'{name}' is made when the model first runs; run a batch through the model before this")
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    cuts = PARAMETER_CUTS.get(model) or {}
    stages = SHARED_BY_STAGES.get(model) or {}

    def described(name: str) -> Parameter:
        return Parameter(name, shapes[name], trainable[name], cuts.get(name), stages.get(name, ()))

    blocks = [
        Block(name, tuple(described(key) for key in places), experts=tuple(_find_experts(model, name)) if name else ())
        for name, places in find_parameters(model).items()
    ]
    mixers = tuple(
        name for name, module in model.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    )
    buffer_bytes = sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    return Profile(blocks[0], tuple(blocks[1:]), buffer_bytes, mixers, model=model)


def _find_experts(model: nn.Module, block: str) -> Iterator[Experts]:
    """Yields the experts of a block: equal children, or stacked parameters, of a module with "expert" in its name.

    Only the name distinguishes experts from other equal submodules: which of them a token is sent to depends on data,
    which a profile does not have.
    """
    for name, module in model.get_submodule(block).named_modules(prefix=block):
        own = name.rpartition(".")[2].lower()
        if "expert" not in own or "shared" in own:  # shared experts compute every token
            continue
        children = [[tuple(p.shape) for p in child.parameters()] for child in module.children()]
        alike = [shapes for shapes in children if shapes]
        stacked = {p.shape[0] if p.dim() > 1 else 0 for p in module._parameters.values() if p is not None}
        if len(alike) > 1 and all(shapes == alike[0] for shapes in alike):
            num_experts = len(alike)
        elif len(stacked) == 1 and max(stacked) > 1:
            num_experts = stacked.pop()
        else:
            continue
        numel = sum(parameter.numel() for parameter in module.parameters()) // num_experts
        parent = model.get_submodule(name.rpartition(".")[0])
        capacity = parent.capacity if isinstance(parent, SparseMLP) else None
        yield Experts(name, num_experts, _per_token(model, name), numel, capacity)


def _per_token(model: nn.Module, experts: str) -> int | None:
    """Returns how many experts a token is sent to; None if it is not stated.

    It is an attribute of the module of experts, of its parent, of a sibling (the router), or of the config of one of
    these or of the model.
    """
    parent = model.get_submodule(experts.rpartition(".")[0])
    near = (model.get_submodule(experts), parent, *parent.children())
    for holder in (*near, *(getattr(module, "config", None) for module in (*near, model))):
        for name in PER_TOKEN_NAMES:
            value = getattr(holder, name, None)
            if type(value) is int:
                return value
    return None


def stage_profile(whole: Profile, model: nn.Module, names: Collection[str], is_first: bool, is_last: bool) -> Profile:
    """Returns the profile of a pipeline stage, with counts taken from the profile of the whole model.

    `model` is the stage's model and `names` are its units. Operations before all layers count for the first stage, and
    the loss for the last. Of the root's counts a stage has FLOPs, saved bytes and memory traffic.
    """
    own = structure(model)
    blocks = {block.name: block for block in whole.blocks}
    inside = tuple(f"{name}." for name in names)

    def is_here(name: str) -> bool:
        return name in names or name.startswith(inside)

    flops = [whole.units[name] for name in names if name not in blocks and name in whole.units]
    saved_by_layer = {
        kind: {name: size for name, size in saved.items() if is_here(name) or (not name and is_first)}
        for kind, saved in whole.root.saved_by_layer.items()
    }
    root = replace(
        own.root,
        flops=sum(one.all for one in flops),
        attention_flops=sum(one.attention for one in flops),
        backward_flops=sum(one.backward for one in flops),
        saved_bytes={kind: sum(saved.values()) for kind, saved in saved_by_layer.items()} if whole.counted else None,
        saved_by_layer=saved_by_layer,
        traffic_by_layer={
            name: one for name, one in whole.root.traffic_by_layer.items() if is_here(name) or (not name and is_first)
        },
    )
    found = tuple(replace(blocks[block.name], parameters=block.parameters) for block in own.blocks)
    return replace(
        own,
        root=root,
        blocks=found,
        counted=whole.counted,
        layers={n: layer for n, layer in whole.layers.items() if is_here(n)},
        layer_calls={n: calls for n, calls in whole.layer_calls.items() if is_here(n)},
        attentions={n: heads for n, heads in whole.attentions.items() if is_here(n)},
        expert_calls={n: calls for n, calls in whole.expert_calls.items() if is_here(n)},
        stream_numel=whole.stream_numel,
        source=whole.source,
        gathers_logits=whole.gathers_logits,
        has_loss=whole.has_loss and is_last,
        _proofs=whole._proofs,
        stream_shape=whole.stream_shape,
    )
