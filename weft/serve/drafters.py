"""The drafter that an engine is asked for."""

from __future__ import annotations

from torch import nn

from weft.serve.draft_model import ModelDrafter
from weft.serve.early_layers import EarlyLayersDrafter
from weft.serve.model_part import EngineOptions, ModelPart
from weft.serve.ngram_drafter import NgramDrafter
from weft.serve.speculation import Drafter, EarlyLayers


def make_drafter(options: EngineOptions, part: ModelPart, num_rows: int, vocab_size: int) -> Drafter:
    """The drafter that `options.speculate` names, for the engine's own `part` of the model."""
    if isinstance(options.speculate, EarlyLayers):
        return EarlyLayersDrafter(part, options.speculate.number, num_rows, vocab_size)
    if isinstance(options.speculate, nn.Module):
        return ModelDrafter(options.speculate, options, part.layout, num_rows, vocab_size)
    return NgramDrafter()
