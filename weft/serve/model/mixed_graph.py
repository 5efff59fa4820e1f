"""Steps with prompts as CUDA graphs: without them, the host takes longer to launch the kernels of a step than the
device takes to compute some hundred tokens.

A graph is captured for some numbers of tokens, when first needed; a step is padded to the next of them. It ends at the
residual stream: logits are computed for the tokens after which one is sampled, whose number is not fixed. Larger steps,
which keep the device busy for longer than the host, are not recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weft.serve.attention.batch import TILE_QUERIES, PagedBatch, tiles_of, to_device
from weft.serve.attention.layer import CacheLayer
from weft.serve.model.decode_graph import GraphRecorder, Record, RecordedSteps
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.step_inputs import TABLE, PageLayout, StepInputs, input_tokens

MAX_TOKENS = 2048
_MAX_PROMPTS = 64  # in one step


class MixedGraphs:
    """The graphs of one model and cache, by the number of tokens."""

    def __init__(
        self,
        paged: PagedModel,
        cache: Sequence[CacheLayer],
        last: Tensor,
        layout: PageLayout,
        context_length: int,
        token_budget: int,
        record: Record | None = None,
    ) -> None:
        self._paged, self._cache, self._last, self._layout = paged, cache, last, layout
        self._steps = RecordedSteps("steps of {} tokens", record or GraphRecorder())
        self.sizes = mixed_sizes(min(MAX_TOKENS, token_budget))
        most = self.sizes[-1]
        self._tables = self._zeros(len(last), TABLE + -(-context_length // layout.block_size))
        self._flat, self._tiles = self._zeros(4, most), self._zeros(4, most // TILE_QUERIES + _MAX_PROMPTS)
        self._lengths = self._zeros(len(last))

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._layout.device)

    def can_run(self, inputs: StepInputs) -> bool:
        num_prompts = len(inputs.queries) - inputs.num_decodes
        return inputs.num_tokens <= self.sizes[-1] and num_prompts <= _MAX_PROMPTS

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor] | None:
        """The logits [sampled, vocab] after the tokens at which requests sample, and the positions of these tokens."""
        size = next(size for size in self.sizes if size >= inputs.num_tokens)
        self._take(inputs, size)
        residual = self._steps.result(size, lambda: self._residual(size))
        if not inputs.sampled:
            return None
        ends = inputs.sampled_tokens(self._layout.device)
        return self._paged.logits(residual[ends]), self._flat[2, ends]

    def captures(self) -> list[Callable[[], None]]:
        """Functions that capture one graph each, the largest first. Padding alone is computed."""
        return [partial(self._capture, size) for size in reversed(self.sizes)]

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        self._take(StepInputs(self._flat[:, :0].cpu(), self._tables[:0].cpu(), [], 0, []), size)
        self._steps.result(size, lambda: self._residual(size))

    def _take(self, inputs: StepInputs, size: int) -> None:
        """Copy the inputs of a step, padded to `size` tokens, into the tensors of the captures."""
        number = inputs.num_tokens
        flat = np.empty((4, size), dtype=np.int32)
        flat[:, :number] = inputs.flat.numpy()
        flat[:, number:] = np.array([0, -1, 0, self._layout.num_blocks * self._layout.block_size])[:, None]
        lengths = np.zeros(len(self._lengths), dtype=np.int32)
        lengths[: inputs.num_decodes] = inputs.tables[: inputs.num_decodes, 0].numpy()
        for target, array in ((self._flat[:, :size], flat), (self._lengths, lengths), (self._tiles, self._of(inputs))):
            target.copy_(to_device(torch.from_numpy(array), self._layout.device))
        requests, width = inputs.tables.shape
        self._tables[:requests, :width].copy_(to_device(inputs.tables, self._layout.device))

    def _of(self, inputs: StepInputs) -> np.ndarray:
        """The tiles of the prompts of a step."""
        first = inputs.num_decodes
        found = tiles_of(inputs.queries[first:], inputs.tables[first:, 0].tolist(), first, first)
        tiles = np.zeros(self._tiles.shape, dtype=np.int32)
        tiles[:, : len(found)] = np.array(found, dtype=np.int32).reshape(-1, 4).T
        return tiles

    def _residual(self, size: int) -> Tensor:
        flat, num_decodes = self._flat[:, :size], min(size, len(self._lengths))
        tiles = self._tiles[:, : size // TILE_QUERIES + _MAX_PROMPTS]
        batch = PagedBatch(
            input_tokens(flat, self._last),
            flat[2],
            flat[3].long(),
            self._tables[:, TABLE:],
            self._lengths,
            self._tables[:, 1],
            self._layout.block_size,
            num_decodes,
            tiles=tiles,
        )
        return self._paged.residual(batch, self._cache)


def mixed_sizes(most: int) -> list[int]:
    """Numbers of tokens that have graphs: close to each other where they are small."""
    sizes = [size for size in (16, 32, *range(64, 1024, 64), *range(1024, most, 128)) if size < most]
    return [*sizes, most]
