"""Captures a step's forward and backward as one CUDA graph and replays it with a single launch.

A step of a convolutional network has about a thousand small kernels, and the host may take longer to launch them than
the GPU takes to compute them. During the capture, weft's hooks run as usual. A replay repeats only their work on the
device, so their state on the host is restored by hand: whole buffers before a replay, gradients after it. Inputs are
copied into the tensors of the capture. The optimizer is not captured, because its numbers change from step to step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from weft.data.config import DataConfig
from weft.errors import ConfigError
from weft.parallel.model_state import all_flats, all_units, named_pieces
from weft.run_file import Run
from weft.sharding.flat_buffer import Flat

Batches = Sequence[tuple[Tensor, ...]]
Compute = Callable[[Batches, Tensor], Tensor]
Replay = Callable[[], None]
Record = Callable[[Callable[[], Tensor]], tuple[Tensor, Replay]]

WARM_STEPS = 3  # steps before the capture, in which kernels are chosen and compiled, and memory is allocated


def wants_graph(run: Run, device: torch.device) -> bool:
    """Does the run capture its step as a CUDA graph?

    `train.graph` decides. If it is not set, image models on one GPU do, if nothing prevents it. Raises ConfigError if
    it is true and something prevents it.
    """
    wanted = run.train.graph
    reason = _obstacle(run, device)
    if wanted and reason is not None:
        raise ConfigError(f"train.graph = true, but {reason}; use false")
    if wanted is None:
        wanted = not isinstance(run.data, DataConfig)
    return reason is None and wanted


def _obstacle(run: Run, device: torch.device) -> str | None:
    """The reason why a step of this run cannot be captured; None if it can."""
    if device.type != "cuda":
        return f"the run is on {device.type}, which has no CUDA graphs"
    if run.plan.num_ranks > 1:
        return f"the plan has {run.plan.num_ranks} ranks, and what they send each other is not recorded"
    if run.split.accumulation > 1:
        return f"a step has {run.split.accumulation} micro-batches, which start their draws anew on the host"
    if run.plan.memory.recompute != "none":
        return f"memory.recompute = '{run.plan.memory.recompute}' reads the state of random draws in between"
    if run.plan.memory.activations:
        return f"memory.activations = {run.plan.memory.activations:g} takes host memory in its own order"
    if run.plan.memory.weights:
        return f"memory.weights = {run.plan.memory.weights:g} makes room for weights in an order of its own"
    if run.train.kfac is not None:
        return "train.kfac samples layers on the host"
    if run.train.layer_drop is not None:
        return "train.layer_drop chooses blocks on the host"
    if run.numbers.repeat_every is not None:
        return "numbers.repeat_every computes micro-batches twice, which a recorded step does not"
    return None


@contextmanager
def own_stream(run: Run, device: torch.device) -> Iterator[bool]:
    """A context that yields whether the run captures its step.

    The model must be built and trained inside it: torch accumulates gradients on the stream on which it first saw a
    parameter, and nothing can be captured on the default stream.
    """
    if not wants_graph(run, device):
        yield False
        return
    with recording_stream(device):
        yield True


@contextmanager
def recording_stream(device: torch.device) -> Iterator[None]:
    """A context with a stream on which steps can be captured. Models must be built and trained inside it."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def record_on_gpu(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """Captures `compute` on the current stream. Returns its result's tensor, and a function that replays it."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        result = compute()
    return result, graph.replay


class Graph:
    """The CUDA graph of a model's forward and backward over one step's micro-batches."""

    def __init__(self, model: nn.Module, say: Callable[[str], None], record: Record = record_on_gpu) -> None:
        self._model, self._say, self._record = model, say, record
        self._num_run, self._failed = 0, False
        self._inputs: list[Tensor] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._hidden: list[Flat] = []  # buffers whose gradients are not visible as `.grad` of their pieces
        self._recorded: tuple[Tensor, Replay] | None = None

    def run(self, batches: Batches, scales: Tensor, compute: Compute) -> Tensor:
        """Returns the result of `compute(batches, scales)` and leaves its gradients on the model.

        It replays the graph. The first steps, and steps with other shapes, are computed without it.
        """
        given = [*(tensor for batch in batches for tensor in batch), scales]
        self._num_run += 1
        if self._recorded is None and (self._failed or self._num_run <= WARM_STEPS):
            return compute(batches, scales)
        if self._recorded is None:
            self._prepare(batches, scales, compute)
        if self._recorded is None or [_kind(tensor) for tensor in given] != [_kind(place) for place in self._inputs]:
            return compute(batches, scales)
        for place, tensor in zip(self._inputs, given, strict=True):
            place.copy_(tensor)
        loss, replay = self._recorded
        self._begin()
        replay()
        self._end()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        for flat in self._hidden:
            flat.hides_gradient = True
        return loss.clone()

    def _prepare(self, batches: Batches, scales: Tensor, compute: Compute) -> None:
        """Captures `compute`. This computes nothing yet, and leaves no gradient on the model."""
        places = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        own_scales = scales.clone()
        self._begin()
        try:
            self._recorded = self._record(lambda: compute(places, own_scales))
        except RuntimeError as error:  # an operation that cannot be captured, or too little memory for a second pool
            self._failed = True
            self._forget_gradients()
            self._say(f"the step cannot be recorded ({str(error).splitlines()[0]}); going on without a CUDA graph")
            return
        finally:
            self._end()
        self._inputs = [*(tensor for batch in places for tensor in batch), own_scales]
        pieces = [piece for _, piece in named_pieces(self._model)]
        self._hidden = [flat for flat in all_flats(self._model) if flat.hides_gradient]
        self._gradients = [(piece, piece.grad) for piece in pieces if piece.grad is not None]

    def _forget_gradients(self) -> None:
        for _, piece in named_pieces(self._model):
            piece.grad = None
        for flat in all_flats(self._model):
            flat.hides_gradient = False

    def _begin(self) -> None:
        for units in all_units(self._model):
            units.begin_step()
            for unit in units.all:
                unit.finish_gather()

    def _end(self) -> None:
        for units in all_units(self._model):
            units.end_step()


def _kind(tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
    return tensor.shape, tensor.dtype
