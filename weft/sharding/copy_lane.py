"""Copies between a device and its host on a stream of their own, in order."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Lane:
    """Copies in one direction, in order, beside what the current stream does; on a CPU at once."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def copy(self, target: Tensor, source: Tensor, behind: Any = None) -> Any:
        """Copy, behind all that the current stream was asked for so far, and an event of another lane; its event."""
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
        """Let the current stream wait for a copy."""
        if self._stream is not None and event is not None:
            torch.cuda.current_stream(self._stream.device).wait_event(event)
