"""Plain language and image models without any code for parallelism, and the import and export of Hugging Face weights.

A config describes a model. `build` creates its modules, `initialise` or `read_weights` sets their values, and
`token_loss` is the loss of a language model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from weft.errors import ConfigError
from weft.models.decoder import Decoder
from weft.models.decoder_config import DecoderArchitecture, DecoderConfig, RopeScaling
from weft.models.gpt2 import GPT2, GPT2Config
from weft.models.hf import read_weights, save_folder, weight_reader, weights, write_weights
from weft.models.hf_config import read_config, write_config
from weft.models.init import LanguageConfig, Model, ModelConfig, build, initial_value, initialise
from weft.models.loss import IGNORE, token_loss
from weft.models.vision import VISION_CONFIGS, VisionConfig
from weft.schema import build_dataclass, nearest

__all__ = [
    "GPT2",
    "IGNORE",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "LanguageConfig",
    "Model",
    "ModelConfig",
    "RopeScaling",
    "VisionConfig",
    "build",
    "config_from_table",
    "initial_value",
    "initialise",
    "read_config",
    "read_weights",
    "save_folder",
    "token_loss",
    "weight_reader",
    "weights",
    "write_config",
    "write_weights",
]

ARCHITECTURES = (*get_args(DecoderArchitecture), "gpt2", *VISION_CONFIGS)


def config_from_table(table: Mapping[str, Any], path: str = "model") -> ModelConfig:
    """Build the config of a run file's table. Its key `architecture` (default "llama") selects the kind of model."""
    architecture = table.get("architecture", "llama")
    if architecture not in ARCHITECTURES:
        raise ConfigError(
            f"unknown '{path}.architecture' = {architecture!r}{nearest(str(architecture), ARCHITECTURES)}"
        )
    if architecture in VISION_CONFIGS:
        return build_dataclass(VISION_CONFIGS[architecture], table, path)
    if architecture == "gpt2":
        return build_dataclass(GPT2Config, table, path)
    return build_dataclass(DecoderConfig, table, path)
