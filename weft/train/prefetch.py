"""Lets the host run ahead of a GPU.

The next step's batches are copied while this step computes. A step's results are read after the next step is queued. On
a CPU neither is delayed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.models.loss import count_unknown
from weft.resilience.bad_numbers import Policy
from weft.roles.batch_queue import BatchQueue
from weft.step.batch import Batch
from weft.step.train_step import StepResult
from weft.train.batches import to_device
from weft.train.metrics import Moment
from weft.train.state import TrainState


class Batches:
    """The batches of each step. The next step's are copied from pinned memory on a separate stream."""

    def __init__(
        self,
        make: Callable[[int], list[Batch]],
        last: int,
        device: torch.device,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        """`close` is called after the last step."""
        self._given, self._last, self.close = make, last, close
        self.seconds = 0.0  # spent on making batches, or on waiting for those of loaders
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._next: tuple[int, list[Batch]] | None = None

    def _make(self, step: int) -> list[Batch]:
        began = time.perf_counter()
        found = self._given(step)
        self.seconds += time.perf_counter() - began
        return found

    def take(self, step: int) -> list[Batch]:
        """Returns the batches of a step."""
        if self._next is None or self._next[0] != step:
            return self._make(step)
        batches, self._next = self._next[1], None
        assert self._stream is not None
        here = torch.cuda.current_stream(self._stream.device)
        here.wait_stream(self._stream)
        for batch in batches:
            for tensor in batch:
                tensor.record_stream(here)  # else the other stream's next copy could reuse its memory
        return batches

    def prepare(self, step: int) -> None:
        """Starts to load a step's batches while the device computes."""
        if self._stream is not None and step < self._last:
            with torch.cuda.stream(self._stream):
                self._next = step, self._make(step)


class PendingResult:
    """A step's loss, gradient norm and verdict while they are copied to the host, and the moment when the step ended.

    The labels are kept to be examined if the results are bad.
    """

    def __init__(
        self, step: int, rate: float, result: StepResult, moment: Moment, batches: Sequence[Batch] = ()
    ) -> None:
        self.step, self.rate, self.moment = step, rate, moment
        self._labels = [batch[1] for batch in batches]
        assert result.verdict is not None, "the loop judges every step"
        values = torch.stack([value.double() for value in (result.loss, result.grad_norm, result.verdict)])
        self._event: torch.cuda.Event | None = None
        self._values: Tensor = values
        if values.is_cuda:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def read(self) -> tuple[float, float, int]:
        """Returns loss, norm and verdict. Waits for the step, but not for work queued after it."""
        if self._event is not None:
            self._event.synchronize()
        loss, norm, verdict = self._values.tolist()
        return loss, norm, int(verdict)

    def wrong_labels(self, num_classes: int) -> str | None:
        """Describes invalid labels of this rank; None if all are valid."""
        return count_unknown(torch.cat([labels.flatten() for labels in self._labels]), num_classes)


def make_batches(state: TrainState, policy: Policy, queue: BatchQueue | None = None) -> Batches:
    """Returns this rank's micro-batches of each step, without the batches that the policy leaves out.

    With a `queue`, loaders make them; otherwise this rank does.
    """
    mesh, last = state.mesh, state.run.train.steps

    def make(step: int) -> list[Batch]:
        if queue is None:
            return state.data.batches(state.run, policy.batch_of(step), mesh["batch"], mesh.device)
        ahead = range(step, min(step + queue.depth + 1, last))
        found = queue.take([policy.batch_of(each) for each in ahead])
        return [to_device(batch, mesh.device) for batch in found]

    return Batches(make, last, mesh.device, queue.close if queue is not None else lambda: None)
