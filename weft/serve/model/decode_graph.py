"""Decodes as CUDA graphs: one launch replays all kernels of a step in which every request computes one token.

A graph is captured for some batch sizes, when first needed; a batch is padded to the next of them. Its inputs are
copied into the tensors of the capture. If a capture fails, steps are computed without graphs, and a warning says so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from weft.serve.attention.batch import PagedBatch, to_device
from weft.serve.attention.layer import CacheLayer
from weft.serve.model.paged_model import PagedModel
from weft.serve.model.step_inputs import TABLE, PageLayout, input_tokens, packed, padding_table
from weft.serve.scheduling.scheduler import ScheduledChunk

Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]


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
        """What the function gives, which is always the same one for a size: recorded first, and replayed."""
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


class DecodeGraphs:
    """The graphs of one model and cache, by the number of rows."""

    def __init__(
        self,
        paged: PagedModel,
        cache: Sequence[CacheLayer],
        last: Tensor,
        layout: PageLayout,
        context_length: int,
        record: Record | None = None,
    ) -> None:
        self._paged, self._cache, self._last, self._layout = paged, cache, last, layout
        self._steps = RecordedSteps("decodes of {} requests", record or GraphRecorder())
        self.sizes = graph_sizes(len(last))
        width = TABLE + -(-context_length // layout.block_size)
        self._flat = torch.zeros(4, self.sizes[-1], dtype=torch.int32, device=layout.device)
        self._tables = torch.zeros(self.sizes[-1], width, dtype=torch.int32, device=layout.device)

    def run(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, Tensor]:
        """The logits [requests, vocab] and positions [requests] of decodes."""
        num_rows = next(size for size in self.sizes if size >= len(chunks))
        flat, tables = (to_device(array, self._layout.device) for array in packed(chunks, self._layout, num_rows))
        self._flat[:, :num_rows].copy_(flat)
        self._tables[:num_rows, : tables.shape[1]].copy_(tables)
        logits = self._replayed(num_rows)
        return logits[: len(chunks)], flat[2, : len(chunks)]

    def captures(self) -> list[Callable[[], None]]:
        """Functions that capture one graph each, the largest first. Padding alone is computed."""
        return [partial(self._capture, size) for size in reversed(self.sizes)]

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
    """Batch sizes that have graphs: close to each other where they are small."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, 128, 16), *range(128, max_rows, 32)) if size < max_rows]
    return [*sizes, max_rows]
