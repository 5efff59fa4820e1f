"""Copies between a device and host memory on a separate CUDA stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class CopyStream:
    """Runs copies in one direction, in order, on a CUDA stream of its own. On a CPU each copy happens at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, behind: Any = None) -> Any:
        """Start a copy after all work queued on the current stream, and after the event `behind` if one is given.

        Returns the event that marks the end of the copy (None on a CPU).
        """
        if self._stream is None:
            target.copy_(source)
            return None
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        if behind is not None:
            self._stream.wait_event(behind)
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return self._stream.record_event()

    def wait(self, event: Any) -> None:
        """Make the current stream wait for a copy, given the event that `copy` returned."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)
