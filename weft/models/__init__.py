"""Plain language and image models without any code for parallelism, and the import and export of Hugging Face weights.

A config describes a model. `build` creates its modules, `initialise` or `read_weights` sets their values, and
`token_loss` is the loss of a language model.
"""

from __future__ import annotations

from weft.architectures import (
    DecoderConfig,
    GPT2Config,
    LanguageConfig,
    ModelConfig,
    RecurrentConfig,
    RopeScaling,
    TransformerConfig,
    VisionConfig,
    config_from_table,
)
from weft.models.decoder import Decoder
from weft.models.gpt2 import GPT2
from weft.models.hf import read_weights, save_folder, weight_reader, weights, write_weights
from weft.models.hf_config import read_config, write_config
from weft.models.init import Model, build, initial_value, initialise
from weft.models.loss import IGNORE, token_loss
from weft.models.recurrent import RecurrentModel

__all__ = [
    "GPT2",
    "IGNORE",
    "Decoder",
    "DecoderConfig",
    "GPT2Config",
    "LanguageConfig",
    "Model",
    "ModelConfig",
    "RecurrentConfig",
    "RecurrentModel",
    "RopeScaling",
    "TransformerConfig",
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
