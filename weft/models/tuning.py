"""What of a model is trained: all of it, all but frozen parameters, or LoRA's updates only."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

import torch
from torch import nn

from weft.architectures import ModelConfig
from weft.architectures.lora import Lora
from weft.errors import ConfigError
from weft.models.init import build
from weft.models.lora import add_lora
from weft.schema import nearest


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
        names = _names(model)
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


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]
