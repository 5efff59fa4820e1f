"""Drafts by the model's own first layers: what they give goes through the last norm and the head.

No weight and no page is held twice. The first layers' keys and values of a draft go to the place in the model's own
cache where the step that checks the drafts writes them again, with the same values, so rejected drafts are overwritten
as those of any drafter. A draft reads the weights of the first layers and of the head.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from weft.errors import ConfigError
from weft.serve.drafts.draft_rounds import DraftRounds, Wanted, until_nan
from weft.serve.model.model_part import ModelPart
from weft.serve.model.step_inputs import runs_of, step_inputs
from weft.serve.scheduling.scheduler import ScheduledChunk


class EarlyLayersDrafter:
    """Drafts of the first `num_layers` layers of an engine's model."""

    def __init__(self, part: ModelPart, num_layers: int, num_rows: int, vocab_size: int) -> None:
        num_whole = len(part.paged.blocks)
        if not 1 <= num_layers < num_whole:
            raise ConfigError(
                f"--speculate layers={num_layers} of a model with {num_whole} layers; drafts need at least 1 layer "
                f"and fewer than all"
            )
        self.context_length = part.context_length
        self._part, self._num_layers = part, num_layers
        self._rounds = DraftRounds(self._logits, num_rows, vocab_size, part.device)

    def draft(self, wanted: Wanted) -> list[list[int]]:
        if not wanted:
            return []
        places = [(active, len(active.tokens) - 1) for active, _ in wanted]  # all before is in the model's cache
        first = self._rounds.sample([ScheduledChunk(active, at, at + 1, True) for active, at in places])
        return [until_nan(drafts) for drafts in self._rounds.following(wanted, first)]

    def _logits(self, chunks: Sequence[ScheduledChunk], last: Tensor) -> tuple[Tensor, Tensor] | None:
        part = self._part
        runs = runs_of(chunks, part.layout)
        part.adapters.choose(((run.active.request.adapter, run.num_tokens) for run in runs), part.device)
        return part.logits(step_inputs(chunks, part.layout), last, self._num_layers)
