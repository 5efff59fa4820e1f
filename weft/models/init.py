"""How a model comes to be: its modules from a config, and its first values from a seed.

Every parameter is drawn from its own generator, keyed by (seed, parameter name). The values therefore do not depend
on the order of drawing, on which rank draws, on the device or on the dtype: any layout starts from the same model (on
CPUs of another kind, from one that may differ in last bits: torch's normal values take the CPU's own logarithm).
All are normal; norms are one, biases zero. Models of language have the scheme of GPT-2: deviation 0.02, and projections
that write to the residual stream scaled by 1 / sqrt(2 * layers). Models of images have that of He et al. (2015), for
convolutions by what leaves them, as in torchvision: deviation sqrt(2 / (outputs × kernel)).
"""

from __future__ import annotations

import hashlib
import math
from typing import overload

import torch
from torch import Tensor

from weft.errors import ConfigError
from weft.models.decoder import Decoder, DecoderConfig
from weft.models.gpt2 import GPT2, GPT2Config
from weft.models.vision import VisionConfig, VisionModel, build_vision

LanguageConfig = DecoderConfig | GPT2Config
LanguageModel = Decoder | GPT2
ModelConfig = LanguageConfig | VisionConfig
Model = LanguageModel | VisionModel

DEVIATION = 0.02
RESIDUAL_PROJECTIONS = ("o_proj.weight", "down_proj.weight", "c_proj.weight")


@overload
def build(config: LanguageConfig) -> LanguageModel: ...
@overload
def build(config: VisionConfig) -> VisionModel: ...
def build(config: ModelConfig) -> Model:
    """The model of a config on the current default device, with values that `initialise` or a checkpoint must set."""
    if isinstance(config, DecoderConfig):
        return Decoder(config)
    return GPT2(config) if isinstance(config, GPT2Config) else build_vision(config)


def initialise(model: Model, seed: int) -> None:
    """Set every parameter of a model in place to its first value."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.is_meta:
                raise ConfigError(f"parameter {name} is on the meta device; call model.to_empty(device=...) first")
            parameter.copy_(initial_value(model.config, name, parameter.shape, seed))


def initial_value(config: ModelConfig, name: str, shape: torch.Size, seed: int) -> Tensor:
    """The first value of one parameter: float32, on the CPU. A tied head has the value of the embedding."""
    if name.endswith(".bias"):
        return torch.zeros(shape, device="cpu")
    if len(shape) == 1:
        return torch.ones(shape, device="cpu")  # a norm
    if isinstance(config, LanguageConfig):
        if config.tie_word_embeddings and name == "lm_head.weight":
            name = config.embedding_name
        deviation = DEVIATION
        if name.endswith(RESIDUAL_PROJECTIONS):
            deviation /= math.sqrt(2 * config.num_layers)
    elif len(shape) == 2:
        deviation = math.sqrt(1 / shape[1])  # a classifier: logits as large as the features that it reads
    else:
        deviation = math.sqrt(2 / (shape[0] * math.prod(shape[2:])))
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=8).digest()
    # 63 bits: the range of seeds that every generator accepts.
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
    return torch.empty(shape, device="cpu", dtype=torch.float32).normal_(0.0, deviation, generator=generator)
