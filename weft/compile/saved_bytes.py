"""Turns a profile into that of the same model with compiled blocks.

Without recompute, a compiled block saves what torch.compile saves (`torch_partition.py`). A block compiled in pieces
saves what `profiling/saved_in_pieces.py` states. Equal blocks are traced once. A block that cannot be traced counts as
uncompiled, which never saves less, and the profile states this (`Profile.assumptions`). Blocks that `y` splits count as
uncompiled, too: torch.compile breaks the graph at the all-reduce after each matmul, and each part saves its inputs and
outputs.
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
from weft.profiling import Block, Profile, ProfileCache, ProfileSource, TensorMetadata
from weft.profiling import profile as profile_of
from weft.profiling.saved_in_pieces import as_in_pieces

MAX_LAYERS = 200  # above this many different layers, blocks are compiled in pieces; a layer takes about a second
_COMPILED = ProfileCache[tuple[str, bool], Profile]()  # by the arguments of `compiled_profile`
_partition_cache: dict[Any, Partition | str] = {}  # by all that a partition depends on; or the reason why it failed


def needs_pieces(blocks: Iterable[nn.Module]) -> bool:
    """Should blocks be compiled in pieces, because whole ones would take long to compile?

    The layers of one block of each kind are counted, because equal blocks are compiled once.
    """
    return sum(layer_kinds(blocks).values()) > MAX_LAYERS


def layer_kinds(blocks: Iterable[nn.Module]) -> dict[str, int]:
    """Returns the number of layers with parameters for each kind of block."""
    return {repr(block): sum(1 for layer in block.modules() if layer._parameters) for block in blocks}


def compiled_profile(profile: Profile, matmul: str = "compute", sends_rows: bool = False) -> Profile:
    """Returns the profile of the same model with compiled blocks, under the plan's `matmul`.

    `sends_rows` says that experts in fp8 are on several ranks, which changes what they save.
    A profile without a loss is returned unchanged.
    """
    source = profile.source
    if source is None or not profile.blocks:
        return profile
    return _COMPILED.get(profile, (matmul, sends_rows), lambda: _compiled(profile, source, matmul, sends_rows))


def _compiled(profile: Profile, source: ProfileSource, matmul: str, sends_rows: bool) -> Profile:
    if needs_pieces(find_blocks(source.model).values()):
        return _in_pieces(profile, source)
    found = _partitions(source, profile.blocks, matmul, sends_rows)
    partitions = {name: one if isinstance(one, Partition) else None for name, one in found.items()}
    failed = {name: one for name, one in found.items() if isinstance(one, str)}
    seen = set[int]()
    blocks = tuple(_with_partition(block, profile, source, partitions[block.name], seen) for block in profile.blocks)
    named = {**source.blocks, **{block.name: block for block in blocks}}
    return replace(
        profile,
        blocks=blocks,
        source=replace(source, blocks=named, eager=source, results={}),
        eager=profile,
        assumptions=_assumptions(failed),
        of_two=None,
        results={},
    )


def _assumptions(failed: Mapping[str, str]) -> tuple[str, ...]:
    """Returns one sentence for each reason, which names the first block."""
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
    return replace(found, source=replace(found.source, in_pieces=True), eager=profile)


def profile_under(profile: Profile, plan: Plan) -> Profile:
    """Returns the profile whose saved bytes are valid under a plan: of compiled or of uncompiled blocks."""
    eager = profile.eager
    if eager is None:
        return profile
    sends_rows = plan.matmul == "fp8" and plan.num_expert_parts > 1
    return eager if plan.tensor.y > 1 else compiled_profile(eager, plan.matmul, sends_rows)


def _with_partition(
    block: Block, profile: Profile, source: ProfileSource, found: Partition | None, seen: set[int]
) -> Block:
    """Returns a block with the bytes that it saves when it is compiled.

    Inputs count if no earlier block has saved them (`seen`). Selective recompute does not save the result of the last
    matmul, which nothing in backward reads.
    """
    if found is None:
        return block
    saved_by_layer = {f"{block.name}.{layer}" if layer else "": size for layer, size in found.saved_by_layer.items()}
    tensors = [leaf for leaf in tree_leaves(source.given[block.name]) if isinstance(leaf, TensorMetadata)]
    for one in (tensors[index] for index in found.saved_inputs):
        if one.storage not in seen:
            seen.add(one.storage)
            saved_by_layer[""] = saved_by_layer.get("", 0) + one.storage_bytes
    inside = [layer for name, layer in profile.layers.items() if name.startswith(f"{block.name}.")]
    width = tensors[0].dtype.itemsize
    last = [layer.rows * layer.out_features * width for layer in inside if layer.is_linear and layer.is_last]
    saved = {**(block.saved_bytes or {}), "none": sum(saved_by_layer.values())}
    saved["selective"] -= sum(last)
    return replace(
        block,
        saved_bytes=saved,
        saved_by_layer={**block.saved_by_layer, "none": saved_by_layer},
        backward_bytes=found.backward_bytes,
        sendable=_sendable(block, found, tensors, last),
        compiled_traffic=found.traffic,
    )


def _sendable(
    block: Block, found: Partition, tensors: Sequence[TensorMetadata], last: Sequence[int]
) -> dict[str, Mapping[Any, int]]:
    """Returns the storages that a compiled block can send to the host, with their bytes, for each recompute policy.

    Without recompute these are the tensors that the block computed and saves, and its input if it saves it. With
    selective recompute they are those of the uncompiled block, except results of `last` bytes.
    """
    made: dict[Any, int] = {f"{block.name}:{number}": size for number, size in enumerate(found.saved_sizes)}
    made |= {f"{block.name}:": tensors[0].storage_bytes} if 0 in found.saved_inputs else {}
    selective = dict(block.sendable.get("selective", {}))
    for size in last:
        key = next((key for key in reversed(selective) if selective[key] == size), None)
        selective.pop(key, None)
    return {**block.sendable, "none": made, "selective": selective}


def _partitions(
    source: ProfileSource, blocks: Sequence[Block], matmul: str, sends_rows: bool
) -> dict[str, Partition | str | None]:
    """Returns for each block its partition, the reason why tracing failed, or None if it has no backward."""
    modules = find_blocks(source.model)
    keys = {
        block.name: (matmul, sends_rows, _key(block, source, modules[block.name]))
        for block in blocks
        if block.in_backward and block.calls == 1 and block.saved_bytes is not None
    }
    missing = {key: name for name, key in keys.items() if key not in _partition_cache}
    for key, name in missing.items():
        _partition_cache[key] = _try_partition(modules[name], source.given[name], source.dtype, matmul, sends_rows)
    return {block.name: _partition_cache[keys[block.name]] if block.name in keys else None for block in blocks}


def _try_partition(
    module: torch.nn.Module, given: Any, dtype: torch.dtype | None, matmul: str, sends_rows: bool
) -> Partition | str:
    try:
        return partition(module, given, dtype, matmul, sends_rows)
    except Exception as error:  # anything that the user's code or torch's trace may raise; `assumptions` reports it
        lines = str(error).strip().splitlines()
        return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"


def _key(block: Block, source: ProfileSource, module: torch.nn.Module) -> Any:
    """Returns a key of a block: its structure, the shapes of its arguments, and its counts."""
    held = module.state_dict(keep_vars=True).items()
    state = tuple((name, tuple(one.shape), one.dtype, one.requires_grad) for name, one in held)
    forms = tree_map(
        lambda leaf: replace(leaf, storage=0) if isinstance(leaf, TensorMetadata) else leaf, source.given[block.name]
    )
    # Not the block's saved bytes: a tensor that several blocks are given counts for the first of them that saves it.
    made = [(policy, tuple(sizes.values())) for policy, sizes in block.sendable.items()]
    counted = block.flops, block.backward_flops, block.read_bytes, block.written_bytes, str(made)
    return str(module), module.training, state, str(source.dtype), str(forms), counted
