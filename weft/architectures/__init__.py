"""The table `[model]` of a run file: the sizes of each architecture, checked without torch.

`config_from_table` returns the config that a table describes; `weft.models.build` makes its modules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from weft.architectures.experts import Capacity
from weft.architectures.language import (
    DecoderArchitecture,
    DecoderConfig,
    GPT2Config,
    RecurrentArchitecture,
    RecurrentConfig,
    RopeScaling,
    TransformerConfig,
)
from weft.architectures.vision import VISION_CONFIGS, VisionConfig
from weft.errors import ConfigError
from weft.schema import build_dataclass, nearest

__all__ = [
    "ARCHITECTURES",
    "VISION_CONFIGS",
    "Capacity",
    "DecoderConfig",
    "GPT2Config",
    "LanguageConfig",
    "ModelConfig",
    "RecurrentConfig",
    "RopeScaling",
    "TransformerConfig",
    "VisionConfig",
    "config_from_table",
]

LanguageConfig = TransformerConfig | RecurrentConfig  # of text; their common fields and methods are the interface
ModelConfig = LanguageConfig | VisionConfig
RECURRENT = get_args(RecurrentArchitecture)
ARCHITECTURES = (*get_args(DecoderArchitecture), "gpt2", *RECURRENT, *VISION_CONFIGS)


def config_from_table(table: Mapping[str, Any], path: str = "model") -> ModelConfig:
    """Build the config of a run file's table. Its key `architecture` (default "llama") selects the kind of model."""
    architecture = table.get("architecture", "llama")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"unknown '{path}.architecture' = {architecture!r}{nearest(str(architecture), ARCHITECTURES)}"
        )
    others: dict[str, type[ModelConfig]] = {**VISION_CONFIGS, "gpt2": GPT2Config}
    others |= dict.fromkeys(RECURRENT, RecurrentConfig)
    return build_dataclass(others.get(architecture, DecoderConfig), table, path)
