"""The drafter that an engine is asked for."""

from __future__ import annotations

from torch import nn

from weft.serve.drafts.draft_model import ModelDrafter
from weft.serve.drafts.early_layers import EarlyLayersDrafter
from weft.serve.drafts.ngram_drafter import NgramDrafter
from weft.serve.model.model_part import ModelPart
from weft.serve.scheduling.speculation import Drafter, EarlyLayers
from weft.serve.spec import EngineOptions


def make_drafter(options: EngineOptions, part: ModelPart, num_rows: int, vocab_size: int) -> Drafter:
    """The drafter that `options.speculate` names, for the engine's own `part` of the model."""
    if isinstance(options.speculate, EarlyLayers):
        return EarlyLayersDrafter(part, options.speculate.number, num_rows, vocab_size)
    if isinstance(options.speculate, nn.Module):
        return ModelDrafter(options.speculate, options, part.layout, num_rows, vocab_size)
    return NgramDrafter()
