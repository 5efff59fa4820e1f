"""Reasons why x and y do not fit a model: sizes that they do not divide, and layers that need whole features.

Each reason states the given value, the rule that failed and what to change.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from torch import nn

from weft.inspection.split_probe import has_adapter, is_feature_wise, linear_sizes
from weft.inspection.tensor_splits import Pairing, Split, is_norm
from weft.parallel.expert.layers import routed_parameters
from weft.parallel.tensor.norm import is_plain_norm
from weft.plan import Plan
from weft.profiling import Profile


def refuse_sizes(profile: Profile, pairing: Pairing, plan: Plan) -> str | None:
    """Returns the first reason why x and y cannot split a pairing's layers, or the values between them; or None."""
    assert profile.model is not None
    if not pairing.splits and not pairing.embeddings:
        return (
            f"tensor.x = {plan.tensor.x} splits linears, convolutions and embeddings, and the model has none that can "
            f"be split{_whole(pairing)}; use tensor.x = tensor.y = 1 (`shard` splits the state of any layer)"
        )
    if (reason := _refuse_reads(profile, pairing)) is not None:
        return reason
    modules = dict(profile.model.named_modules(remove_duplicate=False))  # a search asks this of hundreds of plans
    if (reason := _refuse_adapters(modules, pairing, plan)) is not None:
        return reason
    for split in pairing.splits.values():
        in_and_out = linear_sizes(modules[split.module])
        reason = _refuse_over_x(split, plan.tensor.x)
        if reason is None and plan.tensor.y > 1:
            reason = _refuse_split_over_y(split, in_and_out, plan.tensor.y, pairing.is_whole)
        if reason is not None:
            return reason
    if plan.pipe.degree > 1 and (reason := _refuse_bias_of_heads(profile.model, pairing)):
        return reason
    if plan.tensor.y > 1 and (reason := _refuse_over_y(profile, pairing, plan.tensor.y)):
        return reason
    return _refuse_sequence(profile, pairing, plan) if plan.tensor.sequence else None


def _refuse_adapters(modules: Mapping[str, nn.Module], pairing: Pairing, plan: Plan) -> str | None:
    """Checks that low-rank updates drop nothing and have whole sequences: their products are not gathered in pieces."""
    for name in pairing.splits:
        module = modules[name]
        if has_adapter(module) and plan.tensor.sequence:
            return f"tensor.sequence = true does not split the low-rank update (lora) of '{name}'; use false"
        if has_adapter(module) and vars(module)["dropout"]:
            return (
                f"lora.dropout = {vars(module)['dropout']} drops inputs of the low-rank update of '{name}' only, and x "
                f"and y multiply them together with the weight's; use lora.dropout = 0, or tensor.x = tensor.y = 1"
            )
    return None


def _refuse_reads(profile: Profile, pairing: Pairing) -> str | None:
    """Checks that no split parameter is used outside of its layer, where it would be a rank's part of it."""
    for name in sorted(profile.read_outside):
        layer = pairing.tied.get(name, name).rpartition(".")[0]
        if layer in pairing.splits or layer in pairing.embeddings:
            return (
                f"'{name}' is used outside of the forward of '{layer}', where x would give a part of it instead of the "
                f"whole; use the result of '{layer}' instead, or tensor.x = tensor.y = 1"
            )
    return None


def _refuse_bias_of_heads(model: nn.Module, pairing: Pairing) -> str | None:
    """Checks that no bias of a rank's own heads, as T5's layers hand it on, would go from one stage to another."""
    for name in pairing.scaled:
        if "position_bias" in inspect.signature(type(model.get_submodule(name)).forward).parameters:
            return (
                f"'{name}' hands a bias of each head on to later layers, and x splits the heads: pipe would send parts "
                f"of it from stage to stage; use pipe.degree = 1, or tensor.x = 1"
            )
    return None


def _refuse_over_y(profile: Profile, pairing: Pairing, y: int) -> str | None:
    """Checks that all modules on the residual stream can compute parts of the features, which y splits."""
    assert profile.model is not None
    model = profile.model
    routed = routed_parameters(model)
    if not pairing.is_whole and set(pairing.kept) - routed:
        whole = _whole(pairing, routed)
        return f"tensor.y = {y} splits the features between layers, but not all layers can be{whole}; use y = 1"
    if pairing.is_whole:
        for name in pairing.embeddings:
            if (width := model.get_parameter(f"{name}.weight").shape[1]) % y:
                return f"tensor.y = {y} does not divide the {width} features of '{name}'; use {_divisors(width)}"
        return None
    for name, parameter in model.named_parameters():
        owner, _, _ = name.rpartition(".")
        if name in routed and parameter.shape[-1] % y == 0:
            continue
        if owner in pairing.splits or name in pairing.inner | pairing.tables or not parameter.dim():
            continue
        if parameter.shape[-1] % y:
            return f"tensor.y = {y} does not divide the {parameter.shape[-1]} features of '{name}'; use a divisor"
        if owner in pairing.embeddings:
            continue
        module = model.get_submodule(owner)
        if next(module.children(), None) is None:
            is_plain = is_plain_norm(module, parameter.shape[-1]) if is_norm(module) else is_feature_wise(module)
            if not is_plain:
                return _other_norm(owner, module, y)
        elif parameter.shape[-1] not in _widths(profile, pairing):
            return (
                f"tensor.y = {y} splits the features between layers, and would split the {parameter.shape[-1]} numbers "
                f"of '{name}', which are not as many; make each of them a parameter of its own, without dims, or use "
                f"y = 1"
            )
    if (reason := _refuse_norms_without_weights(profile, pairing, y)) is not None:
        return reason
    if not pairing.embeddings:
        return (
            f"tensor.y = {y} splits the features of what goes from layer to layer, which begins with an nn.Embedding, "
            f"and the model has none: what it is given is whole; use y = 1"
        )
    return None


def _widths(profile: Profile, pairing: Pairing) -> set[int]:
    """Returns how many features the values between layers may have: those of embeddings and of the first block."""
    assert profile.model is not None
    widths = {profile.model.get_parameter(f"{name}.weight").shape[-1] for name in pairing.embeddings}
    return widths | set(profile.stream_shape[-1:])


def _refuse_norms_without_weights(profile: Profile, pairing: Pairing, y: int) -> str | None:
    """Checks that norms without parameters are plain norms of the features between layers. Those of single heads are
    not told from them by a weight, and would be summed over y.
    """
    assert profile.model is not None
    model = profile.model
    features = {model.get_parameter(f"{name}.weight").shape[-1] for name in pairing.embeddings}
    features = {profile.stream_shape[-1]} if profile.stream_shape else features
    for name, layer in profile.layers.items():
        module = model.get_submodule(name)
        if not is_norm(module) or next(module.parameters(), None) is not None:
            continue
        if features and layer.in_features not in features:
            return (
                f"tensor.y = {y} splits the {min(features)} features between layers, and '{name}' "
                f"({type(module).__name__}), which has no weight, norms {layer.in_features}: weft cannot tell whether "
                f"these are split; use y = 1"
            )
        if not is_plain_norm(module, layer.in_features):
            return _other_norm(name, module, y)
    return None


def _other_norm(name: str, module: nn.Module, y: int) -> str:
    return (
        f"tensor.y = {y} splits the features that '{name}' ({type(module).__name__}) works on, and it is neither a "
        f"LayerNorm or RMSNorm as weft knows them nor does it treat each feature alone; use y = 1"
    )


def _refuse_sequence(profile: Profile, pairing: Pairing, plan: Plan) -> str | None:
    chains = sorted({name.rpartition(".")[0] for name in pairing.blocks})
    if not chains:
        return "tensor.sequence = true works between blocks, and the model has none; use false"
    if len(chains) > 1:
        return (
            f"tensor.sequence = true splits the sequence along one chain of blocks, and the model has {len(chains)} "
            f"({', '.join(chains)}); use false"
        )
    within = next((s for s in pairing.splits.values() if s.num_spatial and pairing.block_of(s.module)), None)
    if within is not None:
        return (
            f"tensor.sequence = true splits [batch, sequence, features] between blocks, but '{within.module}' is a "
            f"convolution in a block, where dim 1 is not a sequence; use false"
        )
    alone = next((name for name in pairing.blocks if name in pairing.splits), None)
    if alone is not None:
        return f"tensor.sequence = true works inside blocks, but '{alone}' is a block and a single linear; use false"
    routed = routed_parameters(profile.model) if profile.model is not None else frozenset()
    for name, reason in {**pairing.mixers, **pairing.kept}.items():
        if pairing.block_of(name) is not None and name not in routed:
            return (
                f"tensor.sequence = true gives what x does not split a part of each sequence, but '{name}' may need "
                f"the whole: {reason}; use false"
            )
    return _refuse_stream(profile, pairing) or _refuse_tokens(profile.stream_shape, plan) if profile.counted else None


def _refuse_stream(profile: Profile, pairing: Pairing) -> str | None:
    """Checks that each parameter has gradients of split sequences only, or of whole ones only."""

    def is_of_block(name: str) -> bool:
        return pairing.block_of(pairing.tied.get(name, name)) is not None

    rule = (
        "tensor.sequence = true gives each rank of x a part of each sequence from the first block to the last, and "
        "sums the gradients of the blocks' parameters, and of no others, over x"
    )
    outer = [name for name in profile.in_stream if not is_of_block(name)]
    if outer:
        return f"{rule}; '{min(outer)}' is used there and is none of them; make it one, or use false"
    inner = [name for name in profile.out_of_stream if is_of_block(name)]
    if inner:
        return f"{rule}; '{min(inner)}' is one of them and is used elsewhere, too; use another one there, or use false"
    return None


def _refuse_tokens(stream: tuple[int, ...], plan: Plan) -> str | None:
    if len(stream) != 3:
        return (
            f"tensor.sequence = true splits [batch, sequence, features] between blocks, but the first is given "
            f"{list(stream)}; use false"
        )
    local = stream[1] // plan.context.degree
    if local % plan.tensor.x:
        return (
            f"tensor.sequence = true splits the {local} tokens that a rank has of each sequence over x = "
            f"{plan.tensor.x}; use a sequence that it divides, or tensor.sequence = false"
        )
    if local // plan.tensor.x % plan.tensor.chunks:
        return (
            f"tensor.chunks = {plan.tensor.chunks} does not divide the {local // plan.tensor.x} tokens that a rank "
            f"of x = {plan.tensor.x} has of each sequence; use {_divisors(local // plan.tensor.x)}"
        )
    return None


def _refuse_over_x(split: Split, x: int) -> str | None:
    for part in split.parts:
        what = "heads" if part.unit > 1 else _features(split, is_output=split.kind != "row")
        if part.is_key and part.num_units < x and x % part.num_units:
            return (
                f"tensor.x = {x} and the {part.num_units} key-value heads of '{split.module}' do not divide each "
                f"other; use {_divisors(part.num_units)} or a multiple of {part.num_units}"
            )
        even = split.kind in ("column", "row", "gathered")
        if even and not (part.is_key and part.num_units < x) and part.num_units % x:
            return (
                f"tensor.x = {x} does not divide the {part.num_units} {what} of '{split.module}'; "
                f"use {_divisors(part.num_units)}"
            )
        if split.kind == "head" and part.num_units < x:
            return f"tensor.x = {x} is more than the {part.num_units} outputs of '{split.module}'"
    return None


def _refuse_split_over_y(split: Split, in_and_out: tuple[int, int], y: int, is_whole: bool) -> str | None:
    is_output = split.kind == "row"
    over_y, what = in_and_out[is_output], _features(split, is_output)
    if is_whole and not is_output:  # each rank takes its part of a whole input, and parts may differ in size
        few = f"tensor.y = {y} is more than the {over_y} {what} of '{split.module}'; use at most {over_y}"
        return few if over_y < y else None
    if split.kind == "gathered":
        return f"tensor.y = {y}, but '{split.module}' has no partner to be paired with, and y needs pairs; use y = 1"
    if over_y % y:
        return f"tensor.y = {y} does not divide the {over_y} {what} of '{split.module}'; use {_divisors(over_y)}"
    return None


def _whole(pairing: Pairing, routed: frozenset[str] = frozenset()) -> str:
    """Returns the first module that is left whole, in words; `routed` are parameters of experts and routers."""
    kept = ((name, reason) for name, reason in pairing.kept.items() if name not in routed)
    return next((f" ('{name}' is left whole: {reason})" for name, reason in kept), "")


def _features(split: Split, is_output: bool) -> str:
    return ("output channels" if is_output else "input channels") if split.num_spatial else "features"


def _divisors(number: int) -> str:
    found = [str(value) for value in range(1, min(number, 64) + 1) if number % value == 0]
    return ", ".join(found[:-1]) + " or " + found[-1] if len(found) > 1 else found[0]
