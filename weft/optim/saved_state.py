"""Saves and loads the state of a parallel model and its optimizer: the pieces that this rank writes and reads.

Parameters (in the master dtype) and the optimizer's state are stored under each parameter's own name with the region
that this rank holds. So the layout that loads may differ from the layout that saved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint import Checkpoint, Piece, Region
from weft.errors import CheckpointError
from weft.mesh import Mesh
from weft.optim import AdamW
from weft.optim.adamw import SharedWeights
from weft.optim.buffer_state import KINDS as PENDING_KINDS
from weft.optim.buffer_state import is_pending, stale_reason
from weft.optim.kfac import FACTORS, INVERSES, KFAC
from weft.optim.kfac_ranks import BatchRanks
from weft.optim.one_bit_adam import OneBitAdam
from weft.optim.stepper import Stepper, stepper
from weft.optim.worker_state import is_of_worker
from weft.optim.zero_one_adam import ZeroOneAdam
from weft.parallel.model_state import all_units, buffers_to_save, named_buffers, named_pieces, parameter_names, refresh
from weft.plan import AXES
from weft.run_tables import TrainConfig
from weft.sharding.layout import ParameterPart

logger = logging.getLogger("weft")
SCALAR = Region.whole(())


def make_optimizer(model: nn.Module, config: TrainConfig, mesh: Mesh | None = None) -> Optimizer:
    """AdamW over this rank's parameters, or what `train.compressed` or `train.kfac` ask for.

    These two need the mesh.

    Weight decay applies to matrices, not to vectors (norms, biases).
    """
    trained = [(part, piece) for part, piece in named_pieces(model) if piece.requires_grad]
    groups = [
        {"params": [p for part, p in trained if len(part.parameter.shape) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for part, p in trained if len(part.parameter.shape) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    compressed = config.compressed
    if compressed is not None:
        assert mesh is not None
        given = (model, mesh["data"], groups, config.learning_rate, betas, config.epsilon, 0.0, compressed.freeze_step)
        if compressed.kind == "1bit":
            return OneBitAdam(*given)
        return ZeroOneAdam(*given, compressed.kappa, compressed.local_scaler, compressed.most_local)
    if config.kfac is not None:
        assert mesh is not None
        return KFAC(model, BatchRanks.of(mesh), config.kfac, groups, config.learning_rate, betas, config.epsilon)
    if all_units(model):
        return AdamW(model, groups, config.learning_rate, betas, config.epsilon)
    groups = groups or [{"params": [torch.zeros(0, requires_grad=True)]}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


def pieces_to_save(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Iterator[Piece]:
    """Yields the pieces that this rank writes. Ranks that hold equal copies (over `data`) share the work.

    All ranks call it at once, because ranks with different weights exchange them here (`Stepper.shared_weights`).
    """
    steps = stepper(optimizer)
    steps.synchronize()
    return _pieces(model, mesh, steps.shared_weights(), steps)


def weights_to_send(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Iterator[Piece]:
    """Returns this rank's pieces of a snapshot of the model: its parameters and buffers, without the optimizer's state.
    All ranks together have each element once, and call it at once, as `pieces_to_save`.
    """
    steps = stepper(optimizer)
    steps.synchronize()
    return _pieces(model, mesh, steps.shared_weights(), None)


def _pieces(model: nn.Module, mesh: Mesh, weights: SharedWeights, steps: Stepper | None) -> Iterator[Piece]:
    """Yields this rank's pieces of parameters and buffers, and those of the optimizer's state if `steps` is given."""
    data = mesh["data"]
    for number, part, piece in _first_copies(model, mesh):
        name, region = part.parameter.name, _region(part)
        for kind, value in ({} if steps is None else steps.read_own_state(piece)).items():
            has_elements = value.numel() == piece.numel() and value.dim() == piece.dim()
            yield Piece(name, kind, region if has_elements else Region.whole(tuple(value.shape)), value)
        if number % data.degree != data.index:
            continue
        yield Piece(name, "parameter", region, weights(piece))
        for kind, value in ({} if steps is None else steps.read_state(piece)).items():
            if value.numel() == piece.numel() and value.dim() == piece.dim():
                yield Piece(name, kind, region, value)
            elif _holds_first_element(part):  # a scalar that all ranks share: the rank with the first element writes it
                yield Piece(name, kind, SCALAR, value)
    for name, kind, value in () if steps is None else steps.whole_state():
        yield Piece(name, kind, Region.whole(tuple(value.shape)), value)
    if mesh.is_first_of_stage:
        for name, buffer in dict(buffers_to_save(model)).items():
            yield Piece(name, "buffer", Region.whole(tuple(buffer.shape)), buffer)


def _first_copies(model: nn.Module, mesh: Mesh) -> Iterator[tuple[int, ParameterPart, nn.Parameter]]:
    """Numbered parts that this rank holds as the first, but for `data`, of those with equal copies."""
    parts = mesh.plan.axes_that_split("stages", "weights")
    copies = set(AXES) - {"data", *parts}  # their other ranks hold the same state
    if any(mesh.coordinates[axis] for axis in copies):
        return
    for number, (part, piece) in enumerate(named_pieces(model)):
        cut = part.parameter.cut
        if not part.parameter.copy and (cut is None or cut.is_first):
            yield number, part, piece


def load_state(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Read this rank's parameters, and the optimizer's state for them, from a checkpoint saved under any plan."""
    kinds: dict[str, set[str]] = {}
    for entry in checkpoint.entries():
        kinds.setdefault(entry.name, set()).add(entry.kind)
    _refuse_unknown_parameters(checkpoint, model)
    steps = None if optimizer is None else stepper(optimizer)
    if steps is not None:
        steps.synchronize()
    dropped: str | None = None
    for part, piece in named_pieces(model):
        name, region = part.parameter.name, _region(part)
        checkpoint.read_region(name, "parameter", region, out=piece.detach().view(-1))
        if steps is None:
            continue
        state = {
            kind: _read_state(checkpoint, name, kind, region, piece)
            for kind in sorted(kinds[name] - {"parameter", "buffer", *FACTORS, *INVERSES})
            if not is_of_worker(kind) or kind in steps.worker_kinds(kinds[name])
        }
        if is_pending(state) and (reason := stale_reason(state)) is not None:
            state = {kind: value for kind, value in state.items() if kind not in PENDING_KINDS}
            dropped = f"the delayed update of '{name}' and others {reason}"
        steps.write_state(name, piece, state)
    for name, buffer in named_buffers(model):
        buffer.copy_(checkpoint.read(name, "buffer"))
    if steps is not None:
        steps.finish_writing(lambda name, kind: checkpoint.read(name, kind) if kind in kinds.get(name, ()) else None)
    if dropped is not None:
        logger.warning("weft: %s: %s; it is dropped", checkpoint.path, dropped)
    refresh(model)


def _refuse_unknown_parameters(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Raise CheckpointError if the checkpoint has a parameter that the model lacks: it is of another model."""
    names = parameter_names(model)
    for entry in checkpoint.entries("parameter"):
        if entry.name not in names:
            raise CheckpointError(
                f"{checkpoint.path} holds parameter {entry.name!r}, which is not in the model; give the model that was "
                f"saved, or start anew in another folder"
            )


def _read_state(checkpoint: Checkpoint, name: str, kind: str, region: Region, piece: nn.Parameter) -> Tensor:
    shape = next(entry.shape for entry in checkpoint.entries(kind) if entry.name == name)
    if shape != region.shape:  # a number
        return checkpoint.read(name, kind).clone()  # it is kept, and the file's memory is not ours
    return checkpoint.read_region(name, kind, region).to(piece.device).view(piece.shape)


def _region(part: ParameterPart) -> Region:
    cut = part.parameter.cut
    if cut is None:
        return Region.flat(part.parameter.shape, part.start, part.stop)
    return Region(cut.shape, cut.intervals, part.start, part.stop)


def _holds_first_element(part: ParameterPart) -> bool:
    """Returns whether this rank's part holds the first element of the whole parameter."""
    cut = part.parameter.cut
    return part.start == 0 and (cut is None or all(pieces[0][0] == 0 for pieces in cut.intervals if pieces))
