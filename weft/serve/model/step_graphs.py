"""Steps as CUDA graphs: one launch replays all kernels of a step. Launching them one by one would take the host longer
than the device computes.

A graph is captured for some sizes, when first needed; a step is padded to the next of them, and its inputs are copied
into the tensors of the capture. If a capture fails, steps are computed without graphs, and a warning says so.

Graphs of decodes give logits. Those of steps with prompts end at the residual stream: logits are computed for the
tokens after which one is sampled, whose number is not fixed. Larger steps, which keep the device busy for longer than
the host, are not recorded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from weft.serve.attention.batch import TILE_QUERIES, PagedBatch, tiles_of, to_device
from weft.serve.attention.formats import CacheLayer
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.step_inputs import TABLE, PageLayout, StepInputs, input_tokens, packed, padding_table
from weft.serve.scheduling.scheduler import ScheduledChunk

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]
MAX_TOKENS = 2048  # of a step with prompts that is recorded
_MAX_PROMPTS = 64  # in one step


class GraphRecorder:
    """Captures functions on the GPU; all graphs use one pool of memory, as only one of them runs at a time."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            compute()  # kernels are compiled, and libraries get their memory
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = compute()
        return result, graph.replay


class RecordedSteps:
    """What was recorded, by size. After a failure, a warning says so and functions are called instead."""

    def __init__(self, what: str, record: Record) -> None:
        self._what, self._record = what, record
        self._recorded: dict[int, tuple[Tensor, Replay]] = {}
        self._has_failed = False

    def __len__(self) -> int:
        return len(self._recorded)

    def result(self, size: int, compute: Callable[[], Tensor]) -> Tensor:
        """Return the result of `compute`, which must be the same function whenever it has this size: it is recorded
        once, and replayed from then on.
        """
        if size not in self._recorded and not self._has_failed:
            try:
                self._recorded[size] = self._record(compute)
            except RuntimeError as error:
                self._has_failed = True
                warnings.warn(
                    f"{self._what.format(size)} cannot be captured ({str(error).splitlines()[0]}); going on without "
                    f"CUDA graphs, which is slower",
                    stacklevel=2,
                )
        if size not in self._recorded:
            return compute()
        result, replay = self._recorded[size]
        replay()
        return result


class StepGraphs:
    """The graphs of one model and cache, for steps of some sizes. `last` are the last tokens of the sampler's rows."""

    what = ""  # a step of a size

    def __init__(
        self,
        paged: PagedModel,
        cache: Sequence[CacheLayer],
        last: Tensor,
        layout: PageLayout,
        context_length: int,
        sizes: list[int],
        record: Record | None = None,
    ) -> None:
        self.sizes = sizes  # rising
        self._paged, self._cache, self._last, self._layout = paged, cache, last, layout
        self._steps = RecordedSteps(self.what, record or GraphRecorder())
        self._tables = self._zeros(len(last), TABLE + -(-context_length // layout.block_size))
        self._make_room()

    def _make_room(self) -> None:
        """Make the other tensors that the captured steps read."""
        raise NotImplementedError

    def _zeros(self, *shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self._layout.device)

    def captures(self) -> list[Callable[[], None]]:
        """Return functions that capture one graph each, the largest first. Padding alone is computed."""
        return [partial(self._capture, size) for size in reversed(self.sizes)]

    def _capture(self, size: int) -> None:
        raise NotImplementedError


class DecodeGraphs(StepGraphs):
    """Graphs of steps in which every request computes one token, by the number of rows. They give logits."""

    what = "decodes of {} requests"

    def _make_room(self) -> None:
        self._flat = self._zeros(4, self.sizes[-1])

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """Return the logits [requests, vocab] and positions [requests] of decodes."""
        num_rows = next(size for size in self.sizes if size >= len(chunks))
        flat, tables = (to_device(array, self._layout.device) for array in packed(chunks, self._layout, num_rows))
        self._flat[:, :num_rows].copy_(flat)
        self._tables[:num_rows, : tables.shape[1]].copy_(tables)
        logits = self._replayed(num_rows)
        return logits[: len(chunks)], flat[2, : len(chunks)]

    @torch.inference_mode()
    def _capture(self, size: int) -> None:
        self._flat.zero_()[1].fill_(-1)
        self._flat[3].fill_(self._layout.num_blocks * self._layout.block_size)
        self._tables.zero_()[:, : TABLE + 1].copy_(torch.tensor(padding_table(self._layout)))
        self._replayed(size)

    def _replayed(self, num_rows: int) -> Tensor:
        return self._steps.result(num_rows, lambda: self._logits(num_rows))

    def _logits(self, num_rows: int) -> Tensor:
        flat, tables = self._flat[:, :num_rows], self._tables[:num_rows]
        batch = PagedBatch(
            input_tokens(flat, self._last),
            flat[2],
            flat[3].long(),
            tables[:, TABLE:],
            tables[:, 0],
            tables[:, 1],
            self._layout.block_size,
            num_rows,
        )
        return self._paged.logits(self._paged.residual(batch, self._cache))


def graph_sizes(max_rows: int) -> list[int]:
    """Return the batch sizes of decodes that have graphs: close to each other where they are small."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, 128, 16), *range(128, max_rows, 32)) if size < max_rows]
    return [*sizes, max_rows]


class MixedGraphs(StepGraphs):
    """Graphs of steps with prompts, by the number of tokens. They give the residual stream."""

    what = "steps of {} tokens"

    def _make_room(self) -> None:
        most = self.sizes[-1]
        self._flat, self._tiles = self._zeros(4, most), self._zeros(4, most // TILE_QUERIES + _MAX_PROMPTS)
        self._lengths = self._zeros(len(self._last))

    def can_run(self, inputs: StepInputs) -> bool:
        num_prompts = len(inputs.queries) - inputs.num_decodes
        return inputs.num_tokens <= self.sizes[-1] and num_prompts <= _MAX_PROMPTS

    def run(self, inputs: StepInputs) -> tuple[Tensor, Tensor] | None:
        """Return the logits [sampled, vocab] after the tokens at which requests sample, and the positions of these
        tokens.
        """
        size = next(size for size in self.sizes if size >= inputs.num_tokens)
        self._take(inputs, size)
        residual = self._steps.result(size, lambda: self._residual(size))
        if not inputs.sampled:
            return None
        ends = inputs.sampled_tokens(self._layout.device)
        return self._paged.logits(residual[ends]), self._flat[2, ends]

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
        """Return the tiles of the prompts of a step."""
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


def mixed_sizes(token_budget: int) -> list[int]:
    """Return the numbers of tokens of steps with prompts that have graphs: close to each other where they are small."""
    most = min(MAX_TOKENS, token_budget)
    sizes = [size for size in (16, 32, *range(64, 1024, 64), *range(1024, most, 128)) if size < most]
    return [*sizes, most]
