"""What of a model is trained: all of it, all but frozen parameters, or LoRA's updates only.

LoRA (Hu et al. 2021) trains an update of low rank beside the frozen weight of a linear:

    y = x·W' + scaling · dropout(x)·A'·B'        A [rank, in], B [out, rank], scaling = alpha / rank

`add_lora` replaces the chosen linears inside a model's blocks and freezes everything else. B starts at zero, so the
model starts unchanged. The names of other parameters stay. A plan splits A and B with their linear
(`parallel/tensor/cuts.py`).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.architectures import ModelConfig
from weft.architectures.lora import Lora, is_end_of
from weft.errors import ConfigError
from weft.inspection.blocks import find_blocks
from weft.inspection.split_probe import ADAPTER
from weft.models.init import build
from weft.schema import nearest

A_SUFFIX, B_SUFFIX = (f".{leaf}" for leaf in ADAPTER)
Read = Callable[[str], Tensor]


@dataclass(frozen=True)
class Tuning:
    """Patterns of parameter names that are frozen (`train.freeze`), and LoRA (`[lora]`)."""

    freeze: tuple[str, ...] = ()
    lora: Lora | None = None

    @property
    def adapter(self) -> str | None:
        """The folder of the adapter to start from, if there is one."""
        return None if self.lora is None else self.lora.adapter

    def build_on_meta(self, config: ModelConfig) -> nn.Module:
        """Returns the model of a config on the meta device, with adapters, and with its frozen parameters marked."""
        with torch.device("meta"):
            model = build(config)
        self.apply(model)
        return model

    def apply(self, model: nn.Module) -> None:
        """Freeze parameters and add adapters, in place."""
        freeze(model, self.freeze)
        if self.lora is not None:
            add_lora(model, self.lora)

    def for_copy(self, model: nn.Module) -> tuple[Tuning, tuple[str, ...]]:
        """Returns what applies to a smaller copy of the model, without dropout, and the patterns that match nothing."""
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        kept = tuple(pattern for pattern in self.freeze if any(fnmatchcase(name, pattern) for name in names))
        lora = None if self.lora is None else replace(self.lora, dropout=0.0)
        return Tuning(kept, lora), tuple(pattern for pattern in self.freeze if pattern not in kept)


def freeze(model: nn.Module, patterns: Iterable[str]) -> None:
    """Freeze the parameters whose names match one of the patterns (`model.embed*`), in place.

    A frozen parameter has no gradient and no optimizer state. Raises ConfigError for a pattern that matches nothing.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for pattern in patterns:
        matching = [name for name in parameters if fnmatchcase(name, pattern)]
        if not matching:
            raise ConfigError(
                f"train.freeze: no parameter of the model matches '{pattern}'{nearest(pattern, parameters)}"
            )
        for name in matching:
            parameters[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise ConfigError(f"train.freeze = {list(patterns)} leaves nothing to train; freeze less")


# --- LoRA


class LoraLinear(nn.Linear):
    """A linear with a low-rank update. It takes the weight and bias of an nn.Linear over."""

    def __init__(self, linear: nn.Linear, lora: Lora) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = linear.weight
        self.register_parameter("bias", linear.bias)
        like = {"dtype": linear.weight.dtype, "device": linear.weight.device}
        self.lora_A = nn.Parameter(torch.empty(lora.rank, self.in_features, **like))  # type: ignore[call-overload]
        self.lora_B = nn.Parameter(torch.empty(self.out_features, lora.rank, **like))  # type: ignore[call-overload]
        self.scaling, self.dropout = lora.scaling, lora.dropout

    def forward(self, input: Tensor) -> Tensor:
        out = F.linear(input, self.weight, self.bias)
        kept = F.dropout(input, self.dropout, self.training) if self.dropout else input
        return self.add_update(out, F.linear(kept, self.lora_A))

    def add_update(self, out: Tensor, low: Tensor) -> Tensor:
        """Returns the result with the update, from the product `low` of the input with A."""
        return out + F.linear(low, self.lora_B) * self.scaling


def add_lora(model: nn.Module, lora: Lora, seed: int = 0) -> None:
    """Freeze a model and add updates to the linears of its blocks that `lora.targets` chooses.

    A and B get their initial values, unless the model is on the meta device.
    """
    linears = {
        f"{block}.{name}" if name else block: module
        for block, inside in find_blocks(model).items()
        for name, module in inside.named_modules()
        if type(module) is nn.Linear
    }
    chosen = {name: module for name, module in linears.items() if lora.is_target(name)}
    _refuse_targets(lora, linears, chosen)
    model.requires_grad_(False)
    for name, linear in chosen.items():
        parent, _, leaf = name.rpartition(".")
        made = LoraLinear(linear, lora)
        setattr(model.get_submodule(parent), leaf, made)
        for own, parameter in ((own, getattr(made, own)) for own in ADAPTER):
            if not parameter.is_meta:
                parameter.data.copy_(initial_adapter(f"{name}.{own}", tuple(parameter.shape), seed))


def _refuse_targets(lora: Lora, linears: Collection[str], chosen: Mapping[str, nn.Linear]) -> None:
    """Raise ConfigError if a target is no linear of a block, or the rank is above what any of the linears can use."""
    if not linears:
        raise ConfigError("[lora] updates linears of blocks, and the blocks of this model have none; leave it out")
    names = ", ".join(sorted({name.rpartition(".")[2] for name in linears}))
    if isinstance(lora.targets, str) and not chosen:
        raise ConfigError(
            f"lora.targets = '{lora.targets}' matches the whole name of no linear of a block, such as "
            f"'{min(linears)}'; the blocks have {names}"
        )
    for target in () if isinstance(lora.targets, str) else lora.targets:
        if not any(is_end_of(target, name) for name in chosen):
            raise ConfigError(f"lora.targets: no linear of a block is named '{target}'; the blocks have {names}")
    largest = max(min(linear.in_features, linear.out_features) for linear in chosen.values())
    if lora.adapter is None and lora.rank > largest:  # an adapter that exists may have such a rank
        raise ConfigError(
            f"lora.rank = {lora.rank} is above {largest}, the largest rank that an update of these linears can have; "
            f"use at most {largest}"
        )


def is_adapter(name: str) -> bool:
    """Is this the name of a parameter that `add_lora` adds?"""
    return name.endswith((A_SUFFIX, B_SUFFIX))


def initial_adapter(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """Returns the initial value of A (uniform, as torch initialises a linear) or B (zero), by (seed, name); float32."""
    if name.endswith(B_SUFFIX):
        return torch.zeros(shape, device="cpu")
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape, device="cpu", dtype=torch.float32).uniform_(-bound, bound, generator=generator)


def merged(read: Read, lora: Lora, adapters: set[str]) -> Read:
    """Returns a function that reads parameters of the model without adapters: each weight with its update.

    `read(name)` reads a parameter of the model with adapters, and `adapters` are the names of those of A and B.
    """

    def merge(name: str) -> Tensor:
        module = name.removesuffix(".weight")
        if name == module or f"{module}{A_SUFFIX}" not in adapters:
            return read(name)
        weight = read(name)
        wide = torch.promote_types(weight.dtype, torch.float32)
        update = read(f"{module}{B_SUFFIX}").to(wide) @ read(f"{module}{A_SUFFIX}").to(wide)
        return (weight.to(wide) + update * lora.scaling).to(weight.dtype)

    return merge
