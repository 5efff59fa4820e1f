"""Builds a model from a config and initialises its parameters from a seed.

Each parameter has its own generator, seeded by (seed, parameter name). So its value does not depend on the order of
initialisation, the rank, the device or the dtype: every layout starts from the same model. (On another kind of CPU the
last bits may differ, because torch's normal values use the CPU's own logarithm.) Weights are normal, norms are one,
biases are zero. Language models use the scheme of GPT-2: standard deviation 0.02, and projections that write to the
residual stream scaled by 1 / sqrt(2 * layers). LSTM and GRU have the deviations of torch's own layers, and biases of
one for forget gates (Jozefowicz et al. 2015). Image models use that of He et al. (2015); for convolutions by fan-out,
as in torchvision: standard deviation sqrt(2 / (outputs × kernel)).
"""

from __future__ import annotations

import hashlib
import math
from typing import overload

import torch
from torch import Tensor

from weft.architectures import (
    DecoderConfig,
    GPT2Config,
    LanguageConfig,
    ModelConfig,
    RecurrentConfig,
    TransformerConfig,
    VisionConfig,
)
from weft.errors import ConfigError
from weft.models.decoder import Decoder
from weft.models.gpt2 import GPT2
from weft.models.recurrent import RecurrentModel
from weft.models.vision import VisionModel, build_vision

Transformer = Decoder | GPT2
LanguageModel = Transformer | RecurrentModel
Model = LanguageModel | VisionModel

BIASES = ("bias", "bias_ih", "bias_hh")


@overload
def build(config: TransformerConfig) -> Transformer: ...
@overload
def build(config: RecurrentConfig) -> RecurrentModel: ...
@overload
def build(config: LanguageConfig) -> LanguageModel: ...
@overload
def build(config: VisionConfig) -> VisionModel: ...
def build(config: ModelConfig) -> Model:
    """Build the model of a config on the default device. `initialise` or a checkpoint must set its values."""
    if isinstance(config, DecoderConfig):
        return Decoder(config)
    if isinstance(config, RecurrentConfig):
        return RecurrentModel(config)
    return GPT2(config) if isinstance(config, GPT2Config) else build_vision(config)


def initialise(model: Model, seed: int) -> None:
    """Set every parameter of a model in place to its initial value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ConfigError(f"parameter {name} is on the meta device; call model.to_empty(device=...) first")
            parameter.copy_(initial_value(model.config, name, parameter.shape, seed))


def initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """Returns the initial value of one parameter: float32, on the CPU. A tied head has the value of the embedding."""
    if name.rpartition(".")[2] in BIASES:
        value = torch.zeros(shape, device="cpu")
        if config.architecture == "lstm" and name.endswith("bias_ih"):
            value[len(value) // 4 : len(value) // 2] = 1  # forget gates, which are then open
        return value
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")  # a norm
    if isinstance(config, LanguageConfig):
        if config.tie_word_embeddings and name == "lm_head.weight":
            name = config.embedding_name
        deviation = config.initial_deviation(name, shape[-1])
    elif len(shape) == 2:
        deviation = math.sqrt(1 / shape[1])  # a classifier: its logits have the scale of its input features
    else:
        deviation = math.sqrt(2 / (shape[0] * math.prod(shape[2:])))
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # 63 bits: every generator accepts seeds of this range.
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, deviation, generator=generator)
