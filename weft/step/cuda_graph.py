"""Forward and backward of a step as one CUDA graph: recorded once, then replayed with a single launch.

A step of a convolutional network is a thousand small kernels, which the host may take longer to launch than a GPU to
compute. While a graph is recorded weft's hooks run as ever; a replay repeats only what they made the device do, so what
they left on the host is put back by hand: whole buffers before it, gradients behind it. Inputs are copied into the
tensors that were recorded. The optimizer stays outside: its numbers change from step to step.
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

WARM_STEPS = 3  # kernels are chosen and compiled, and memory is asked for, before anything is recorded


def wants_graph(run: Run, device: torch.device) -> bool:
    """Whether a run records its step: as it says, or else models of images on one GPU, where that is possible."""
    wanted = run.train.graph
    reason = _obstacle(run, device)
    if wanted and reason is not None:
        raise ConfigError(f"train.graph = true, but {reason}; use false")
    if wanted is None:
        wanted = not isinstance(run.data, DataConfig)
    return reason is None and wanted


def _obstacle(run: Run, device: torch.device) -> str | None:
    """Why a step of this run cannot be recorded."""
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
    if run.train.layer_drop is not None:
        return "train.layer_drop chooses blocks on the host"
    if run.numbers.repeat_every is not None:
        return "numbers.repeat_every computes micro-batches twice, which a recorded step does not"
    return None


@contextmanager
def own_stream(run: Run, device: torch.device) -> Iterator[bool]:
    """Whether the run records its step. It is built and trained inside of this: torch adds up gradients on the stream
    on which it first saw a parameter, and nothing can be recorded on the default one.
    """
    if not wants_graph(run, device):
        yield False
        return
    with recording_stream(device):
        yield True


@contextmanager
def recording_stream(device: torch.device) -> Iterator[None]:
    """A stream on which steps can be recorded, for all that is built and trained inside of this."""
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)


def record_on_gpu(compute: Callable[[], Tensor]) -> tuple[Tensor, Replay]:
    """Record what `compute` does on the current stream; its result's place, and what does it again."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
        result = compute()
    return result, graph.replay


class Graph:
    """A model's forward and backward over one step's micro-batches."""

    def __init__(self, model: nn.Module, say: Callable[[str], None], record: Record = record_on_gpu) -> None:
        self._model, self._say, self._record = model, say, record
        self._num_run, self._failed = 0, False
        self._inputs: list[Tensor] = []
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._hidden: list[Flat] = []  # with gradients that pieces cannot show
        self._recorded: tuple[Tensor, Replay] | None = None

    def run(self, batches: Batches, scale: Tensor, compute: Compute) -> Tensor:
        """What `compute(batches, scale)` gives and leaves. The first steps, and those of other shapes, are computed."""
        given = [*(tensor for batch in batches for tensor in batch), scale]
        self._num_run += 1
        if self._recorded is None and (self._failed or self._num_run <= WARM_STEPS):
            return compute(batches, scale)
        if self._recorded is None:
            self._prepare(batches, scale, compute)
        if self._recorded is None or [_kind(tensor) for tensor in given] != [_kind(place) for place in self._inputs]:
            return compute(batches, scale)
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

    def _prepare(self, batches: Batches, scale: Tensor, compute: Compute) -> None:
        """Record `compute`. Nothing of it is done yet, and no gradient is left on the model."""
        places = [tuple(tensor.clone() for tensor in batch) for batch in batches]
        own_scale = scale.clone()
        self._begin()
        try:
            self._recorded = self._record(lambda: compute(places, own_scale))
        except RuntimeError as error:  # an operation that cannot be recorded, or no room for a second pool of memory
            self._failed = True
            self._forget_gradients()
            self._say(f"the step cannot be recorded ({str(error).splitlines()[0]}); going on without a CUDA graph")
            return
        finally:
            self._end()
        self._inputs = [*(tensor for batch in places for tensor in batch), own_scale]
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
