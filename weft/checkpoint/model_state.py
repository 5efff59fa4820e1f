"""Between a parallel model and a checkpoint: which pieces this rank writes, and how it takes them back under any plan.

Parameters (in the master dtype) and the optimizer's state are stored under each parameter's own name with the region
that this rank holds, so the layout that saved and the layout that loads need not agree.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.checkpoint import Checkpoint, Piece, Region
from weft.errors import CheckpointError
from weft.mesh import Mesh
from weft.optim import AdamW
from weft.optim.delayed_update import KINDS as PENDING_KINDS
from weft.optim.delayed_update import is_pending, refuse_undelayed, stale_reason
from weft.parallel.model_state import all_units, buffers_to_save, named_buffers, named_pieces, parameter_names, refresh
from weft.run_tables import TrainConfig
from weft.sharding.layout import ParameterPart

logger = logging.getLogger("weft")
SCALAR = Region.whole(())


def make_optimizer(model: nn.Module, config: TrainConfig) -> Optimizer:
    """AdamW over this rank's state; matrices decay, vectors (norms, biases) do not."""
    trained = [(part, piece) for part, piece in named_pieces(model) if piece.requires_grad]
    groups = [
        {"params": [p for part, p in trained if len(part.parameter.shape) >= 2], "weight_decay": config.weight_decay},
        {"params": [p for part, p in trained if len(part.parameter.shape) < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (config.beta1, config.beta2)
    if all_units(model):
        return AdamW(model, groups, config.learning_rate, betas, config.epsilon)
    groups = groups or [{"params": [torch.zeros(0, requires_grad=True)]}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=config.epsilon, fused=True)


def pieces_to_save(model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Iterator[Piece]:
    """The pieces that this rank writes: its share of what its replicas over `data` hold alike."""
    data = mesh["data"]
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
    for number, (part, piece) in enumerate(named_pieces(model)):
        cut = part.parameter.cut
        is_first = not part.parameter.copy and (cut is None or cut.is_first)
        if number % data.degree != data.index or mesh["tile"].index or mesh["context"].index or not is_first:
            continue
        name, region = part.parameter.name, _region(part)
        yield Piece(name, "parameter", region, piece.detach())
        for kind, value in _state_of(optimizer, piece).items():
            if value.numel() == piece.numel() and value.dim() == piece.dim():
                yield Piece(name, kind, region, value)
            elif _begins(part):  # a scalar that every rank holds alike: whoever has the beginning writes it
                yield Piece(name, kind, SCALAR, value)
    if mesh.is_first_of_stage:
        for name, buffer in dict(buffers_to_save(model)).items():
            yield Piece(name, "buffer", Region.whole(tuple(buffer.shape)), buffer)


def _state_of(optimizer: Optimizer, piece: nn.Parameter) -> Mapping[str, Tensor]:
    if isinstance(optimizer, AdamW) and piece.requires_grad:
        return optimizer.read_state(piece)
    state: Mapping[str, Tensor] = optimizer.state.get(piece, {})
    return state


def load_state(checkpoint: Checkpoint, model: nn.Module, optimizer: Optimizer | None) -> None:
    """Fill this rank's pieces, and the optimizer's state for them, from a checkpoint saved under any plan."""
    kinds: dict[str, set[str]] = {}
    for entry in checkpoint.entries():
        kinds.setdefault(entry.name, set()).add(entry.kind)
    _refuse_leftovers(checkpoint, model)
    if isinstance(optimizer, AdamW):
        optimizer.synchronize()
    states: dict[nn.Parameter, dict[str, Tensor]] = {}
    dropped: str | None = None
    for part, piece in named_pieces(model):
        name, region = part.parameter.name, _region(part)
        checkpoint.read_region(name, "parameter", region, out=piece.detach().view(-1))
        if optimizer is None:
            continue
        state = {
            kind: _read_state(checkpoint, name, kind, region, piece)
            for kind in sorted(kinds[name] - {"parameter", "buffer"})
        }
        if is_pending(state) and (reason := stale_reason(state)) is not None:
            state = {kind: value for kind, value in state.items() if kind not in PENDING_KINDS}
            dropped = f"the delayed update of '{name}' and others {reason}"
        if not isinstance(optimizer, AdamW):
            if is_pending(state):
                refuse_undelayed(name)
            states[piece] = state
        elif piece.requires_grad:  # at once, so that no second copy of all state is ever there
            _write_state(optimizer, piece, state)
    for name, buffer in named_buffers(model):
        buffer.copy_(checkpoint.read(name, "buffer"))
    if optimizer is not None and not isinstance(optimizer, AdamW):
        _load_optimizer(optimizer, states)
    if dropped is not None:
        logger.warning("weft: %s: %s; it is dropped", checkpoint.path, dropped)
    refresh(model)


def load_parameters(checkpoint: Checkpoint, model: nn.Module) -> None:
    """Fill the parameters only, for evaluation, generation or export."""
    load_state(checkpoint, model, None)


def _refuse_leftovers(checkpoint: Checkpoint, model: nn.Module) -> None:
    """A checkpoint that holds more than the model is of another model."""
    names = parameter_names(model)
    for entry in checkpoint.entries("parameter"):
        if entry.name not in names:
            raise CheckpointError(
                f"{checkpoint.path} holds parameter {entry.name!r}, which is not in the model; give the model that was "
                f"saved, or start anew in another folder"
            )


def _read_state(checkpoint: Checkpoint, name: str, kind: str, region: Region, piece: nn.Parameter) -> Tensor:
    shape = next(entry.shape for entry in checkpoint.entries(kind) if entry.name == name)
    if shape == ():
        return checkpoint.read(name, kind)
    return checkpoint.read_region(name, kind, region).to(piece.device).view(piece.shape)


def _write_state(optimizer: AdamW, piece: nn.Parameter, state: Mapping[str, Tensor]) -> None:
    """A checkpoint from before the first update has no state: what the optimizer holds by now is forgotten."""
    if state:
        optimizer.write_state(piece, state)
    else:
        optimizer.forget_state(piece)


def _load_optimizer(optimizer: Optimizer, states: dict[nn.Parameter, dict[str, Tensor]]) -> None:
    """Through the optimizer's own load_state_dict, which puts each value where it keeps it."""
    ordered = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    optimizer.load_state_dict(
        {
            "state": {i: states[parameter] for i, parameter in enumerate(ordered) if states.get(parameter)},
            "param_groups": optimizer.state_dict()["param_groups"],
        }
    )


def _region(part: ParameterPart) -> Region:
    cut = part.parameter.cut
    if cut is None:
        return Region.flat(part.parameter.shape, part.start, part.stop)
    return Region(cut.shape, cut.intervals, part.start, part.stop)


def _begins(part: ParameterPart) -> bool:
    """Whether the part holds the first element of the whole parameter."""
    cut = part.parameter.cut
    return part.start == 0 and (cut is None or all(pieces[0][0] == 0 for pieces in cut.intervals if pieces))
