"""The state of a parallel model on this rank: its units, pieces, buffers and their bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

from torch import Tensor, nn
from torch.optim import Optimizer

from weft.inspection.model_tensors import saved_buffers
from weft.memory.activation_copies import offloader_of
from weft.memory.offload_activations import ACTIVATIONS
from weft.pipeline.rank_model import rank_model
from weft.profiling import Parameter
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import ParameterPart
from weft.sharding.streamed_buffer import StreamedFlat
from weft.sharding.units import Units, units_of


def all_units(model: nn.Module) -> list[Units]:
    """Returns the units that hold a model's state: one set for each of its stages; none without flat buffers."""
    return [units for units, _ in rank_model(model).named_units()]


def all_flats(model: nn.Module) -> list[Flat]:
    """Every flat buffer of a model on this rank."""
    return [flat for units in all_units(model) for flat in units.flats]


def sync_gradients(model: nn.Module, enabled: bool) -> None:
    """Say whether the next backward reduces gradients; switch it off for all but the last micro-batch of a step."""
    for units in all_units(model):
        units.sync = enabled


@contextmanager
def watching_reads(model: nn.Module) -> Iterator[None]:
    """Refuse reads of parameters that the code inside cannot see whole, if it is the model's first forward."""
    with ExitStack() as watches:
        for units in all_units(model):
            watches.enter_context(units.reads.watching())
        yield


def named_pieces(model: nn.Module) -> Iterator[tuple[ParameterPart, nn.Parameter]]:
    """Every parameter's part on this rank (empty ones left out) with the 1-D tensor that holds it.

    For a model that one rank holds plainly, the parts are the parameters themselves, in their own shapes.
    """
    for module, in_whole in rank_model(model).named_models():
        for part, piece in _pieces_of(module):
            yield replace(part, parameter=in_whole(part.parameter)), piece


def _pieces_of(model: nn.Module) -> Iterator[tuple[ParameterPart, nn.Parameter]]:
    units = units_of(model)
    if units is None:
        for name, parameter in model.named_parameters():
            spec = Parameter(name, tuple(parameter.shape), parameter.requires_grad)
            yield ParameterPart(spec, 0, parameter.numel(), 0), parameter
        return
    for flat in units.flats:
        for part, piece in zip(flat.layout.parts(flat.shard.index), flat.pieces, strict=True):
            if part.numel:
                yield part, piece


def named_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that a checkpoint holds, by their names in the whole model."""
    return _buffers_of(rank_model(model).models)


def buffers_to_save(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the buffers that this rank writes to a checkpoint, by their names in the whole model."""
    return _buffers_of(rank_model(model).saved_models)


def _buffers_of(models: Iterable[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for own in models:
        yield from saved_buffers(own)


def parameter_names(model: nn.Module) -> set[str]:
    """Returns the names of all parameters of the whole model, also of those that only other pipeline stages hold."""
    return rank_model(model).parameter_names


def refresh(model: nn.Module) -> None:
    """Tell the model that its pieces were changed from outside (a checkpoint was loaded)."""
    for flat in all_flats(model):
        flat.refresh()


def state_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Returns the tensors that stay on this rank's device from step to step, by kind. All exist after backward."""
    pieces, flats = [piece for _, piece in named_pieces(model)], all_flats(model)
    away = {id(piece) for flat in flats if flat.options.on_host for piece in flat.pieces}
    gradients = [buffer for flat in flats for buffer in flat.device_gradients]
    there = {id(piece) for flat in flats if flat.is_streamed for piece in flat.pieces}
    gradients += [piece.grad for piece in pieces if id(piece) not in there]
    values = [value for piece, state in optimizer.state.items() if id(piece) not in away for value in state.values()]
    slices = [flat.slice for flat in flats if not (flat.options.on_host and flat.is_apart)]
    found = {
        "parameters": [*(pieces if not flats else ()), *(flat.whole for flat in flats), *slices],
        "gradients": [gradient for gradient in gradients if gradient is not None],
        "optimizer": [value for value in values if isinstance(value, Tensor)],
        "buffers": list(model.buffers()),
    }
    beside: dict[str, list[Tensor]] = getattr(optimizer, "beside", {})
    return {kind: [*found.get(kind, []), *beside.get(kind, [])] for kind in {**found, **beside}}


def host_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Returns this rank's tensors of state, and its offloaded activations, in host memory, by kind."""
    flats = [flat for flat in all_flats(model) if flat.options.on_host]
    sender = offloader_of(model)
    slices = [flat.slice for flat in flats if flat.is_apart]
    streamed = [flat for flat in flats if isinstance(flat, StreamedFlat)]
    values = [value for flat in flats for piece in flat.pieces for value in optimizer.state.get(piece, {}).values()]
    found = {
        "parameters": [*slices, *(flat.home for flat in streamed)],
        "gradients": [flat.slice_gradient for flat in streamed if flat.slice_gradient is not None],
        "optimizer": [value for value in values if isinstance(value, Tensor)],
    }
    found[ACTIVATIONS] = sender.pool.buffers if sender is not None else []
    return {kind: tensors for kind, tensors in found.items() if tensors}


def state_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Returns the bytes of `state_tensors`, by kind. They equal what `cost` predicts."""
    return {kind: _storage_bytes(tensors) for kind, tensors in state_tensors(model, optimizer).items()}


def host_bytes(model: nn.Module, optimizer: Optimizer) -> dict[str, int]:
    """Returns the bytes of `host_tensors`, by kind. They equal what `cost` predicts."""
    return {kind: _storage_bytes(tensors) for kind, tensors in host_tensors(model, optimizer).items()}


def _storage_bytes(tensors: Iterable[Tensor]) -> int:
    storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())
