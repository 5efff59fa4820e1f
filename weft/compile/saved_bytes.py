"""A profile of blocks that are compiled: what they save without recompute is what torch.compile keeps; in pieces, what
weft/profile/saved_in_pieces.py says.

Blocks that are alike are traced once. One that cannot be traced counts as uncompiled, which is never less, and the
profile says so (`assumptions`). So do blocks that `y` splits: torch.compile steps around the sum behind each matmul,
and the pieces keep what enters and leaves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from weft.compile.torch_partition import Partition, partition
from weft.inspection.blocks import find_blocks
from weft.plan import Plan
from weft.profile import Block, Profile, ProfileSource, TensorForm
from weft.profile import profile as profile_of
from weft.profile.saved_in_pieces import as_in_pieces

MAX_LAYERS = 200  # that are compiled in whole blocks; each takes about a second
_found: dict[Any, Partition | str] = {}  # by all that a partition depends on; why there is none


def in_pieces(blocks: Iterable[nn.Module]) -> bool:
    """Whether blocks have so many different layers that whole ones would take long to compile: those of one of each
    kind; others look alike.
    """
    return sum(layer_kinds(blocks).values()) > MAX_LAYERS


def layer_kinds(blocks: Iterable[nn.Module]) -> dict[str, int]:
    """How many layers a block has, of each kind of block."""
    return {repr(block): sum(1 for layer in block.modules() if layer._parameters) for block in blocks}


def compiled(profile: Profile, matmul: str = "compute") -> Profile:
    """The profile of the same model with compiled blocks, under the plan's `matmul`, which keeps this one; one without
    a loss as it is.
    """
    if profile.source is None or not profile.blocks:
        return profile
    key = f"compiled {matmul}"
    if key not in profile.cache:
        profile.cache[key] = _compiled(profile, profile.source, matmul)
    found: Profile = profile.cache[key]
    return found


def _compiled(profile: Profile, source: ProfileSource, matmul: str) -> Profile:
    if in_pieces(find_blocks(source.model).values()):
        return _in_pieces(profile, source)
    found = _partitions(source, profile.blocks, matmul)
    partitions = {name: one if isinstance(one, Partition) else None for name, one in found.items()}
    failed = {name: one for name, one in found.items() if isinstance(one, str)}
    seen = set[int]()
    blocks = tuple(_kept(block, profile, source, partitions[block.name], seen) for block in profile.blocks)
    named = {**source.blocks, **{block.name: block for block in blocks}}
    return replace(
        profile,
        blocks=blocks,
        source=replace(source, blocks=named, eager=source, cache={}),
        cache={**profile.cache, "eager": profile, "assumptions": _assumptions(failed)},
    )


def assumptions(profile: Profile) -> tuple[str, ...]:
    """What a profile of compiled blocks assumes where a block could not be traced, in words."""
    found: tuple[str, ...] = profile.cache.get("assumptions", ())
    return found


def _assumptions(failed: Mapping[str, str]) -> tuple[str, ...]:
    """One line for each reason, which names the first block."""
    names: dict[str, list[str]] = {}
    for name, reason in failed.items():
        names.setdefault(reason, []).append(name)
    return tuple(
        f"block '{blocks[0]}'{f' and {len(blocks) - 1} more' * (len(blocks) > 1)} could not be traced as compiled "
        f"({reason}): counted as uncompiled, which saves at least as many bytes"
        for reason, blocks in names.items()
    )


def _in_pieces(profile: Profile, source: ProfileSource) -> Profile:
    with as_in_pieces():
        found = profile_of(source.model, source.example, source.finish, source.dtype)
    assert found.source is not None
    return replace(found, source=replace(found.source, in_pieces=True), cache={**profile.cache, "eager": profile})


def under(profile: Profile, plan: Plan) -> Profile:
    """The profile that tells what a plan keeps, of one that may be of compiled blocks."""
    eager: Profile | None = profile.cache.get("eager")
    if eager is None:
        return profile
    return eager if plan.tensor.y > 1 else compiled(eager, plan.matmul)


def _kept(block: Block, profile: Profile, source: ProfileSource, found: Partition | None, seen: set[int]) -> Block:
    """A block with what it keeps when it is compiled; of what it was given, what none before it has kept. Selective
    recompute does not keep the result of the last matmul, which nothing in backward reads.
    """
    if found is None:
        return block
    behind = {f"{block.name}.{layer}" if layer else "": size for layer, size in found.behind.items()}
    tensors = [leaf for leaf in tree_leaves(source.given[block.name]) if isinstance(leaf, TensorForm)]
    for one in (tensors[index] for index in found.given):
        if one.storage not in seen:
            seen.add(one.storage)
            behind[""] = behind.get("", 0) + one.storage_bytes
    inside = [layer for name, layer in profile.layers.items() if name.startswith(f"{block.name}.")]
    width = tensors[0].dtype.itemsize
    last = [layer.rows * layer.out_features * width for layer in inside if layer.is_linear and layer.is_last]
    saved = {**(block.saved_bytes or {}), "none": sum(behind.values())}
    saved["selective"] -= sum(last)
    return replace(
        block,
        saved_bytes=saved,
        saved_behind={**block.saved_behind, "none": behind},
        backward_bytes=found.backward_bytes,
        sendable=_sendable(block, found, tensors, last),
        compiled_moves=found.moves,
    )


def _sendable(
    block: Block, found: Partition, tensors: Sequence[TensorForm], last: Sequence[int]
) -> dict[str, Mapping[Any, int]]:
    """What it made, and the stream that it was given, if it keeps that; selective, all but results of `last` bytes."""
    made: dict[Any, int] = {f"{block.name}:{number}": size for number, size in enumerate(found.made)}
    made |= {f"{block.name}:": tensors[0].storage_bytes} if 0 in found.given else {}
    selective = dict(block.sendable.get("selective", {}))
    for size in last:
        key = next((key for key in reversed(selective) if selective[key] == size), None)
        selective.pop(key, None)
    return {**block.sendable, "none": made, "selective": selective}


def _partitions(source: ProfileSource, blocks: Sequence[Block], matmul: str) -> dict[str, Partition | str | None]:
    """By block: its partition, why it has none, or None for one that has no backward."""
    modules = find_blocks(source.model)
    keys = {block.name: (matmul, _key(block, source, modules[block.name])) for block in blocks if _has_backward(block)}
    missing = {key: name for name, key in keys.items() if key not in _found}
    for key, name in missing.items():
        _found[key] = _try(modules[name], source.given[name], source.dtype, matmul)
    return {block.name: _found[keys[block.name]] if block.name in keys else None for block in blocks}


def _try(module: torch.nn.Module, given: Any, dtype: torch.dtype | None, matmul: str) -> Partition | str:
    try:
        return partition(module, given, dtype, matmul)
    except Exception as error:  # anything that the user's code, or torch's trace of it, may raise: told to the user
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _has_backward(block: Block) -> bool:
    return block.in_backward and block.calls == 1 and block.saved_bytes is not None


def _key(block: Block, source: ProfileSource, module: torch.nn.Module) -> Any:
    """The structure of a block, the forms of its arguments, and what was counted of it."""
    held = module.state_dict(keep_vars=True).items()
    state = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in held)
    forms = tree_map(
        lambda leaf: replace(leaf, storage=0) if isinstance(leaf, TensorForm) else leaf, source.given[block.name]
    )
    counted = block.flops, str(block.saved_bytes), str({**block.saved_behind}.get("none", {}).values())
    return str(module), module.training, state, str(source.dtype), str(forms), counted
