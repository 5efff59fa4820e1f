"""Compares what the split model returns, any nested value of tensors, with what the unsplit one returns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.functional_call import in_mode
from weft.inspection.nested_tensors import tensors_in
from weft.mesh import Mesh
from weft.parallel.context.axis import own_tokens
from weft.parallel.tensor.split_logits import own_logits
from weft.parallel.tensor.vocabulary import vocabulary_of
from weft.parallel.tile import own_targets, tile
from weft.pipeline.rank_model import pipeline_of
from weft.proof.compare import Pairs, largest_of, results
from weft.spatial.dry_run import tiling_of
from weft.step.batch import Batch
from weft.step.objective import Objective
from weft.step.train_step import own_part


class _Called(BaseException):
    """Raised when the objective calls the model. Not an Exception, so the objective does not catch it."""


def arguments_of(model: nn.Module, objective: Objective, batch: Batch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with which an objective first calls the model for a batch. The model does not run."""
    found: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        found.append((args, kwargs))
        raise _Called

    handle = model.register_forward_pre_hook(stop, with_kwargs=True, prepend=True)
    try:
        with torch.no_grad():
            objective.total(model, batch)
    except _Called:
        return found[0]
    finally:
        handle.remove()
    raise PlanError(
        f"the objective did not call {type(model).__name__} itself, and weft splits what model(...) computes; call the "
        f"model, not its modules"
    )


def compare_result(
    model: nn.Module,
    mesh: Mesh,
    objective: Objective,
    batch: Batch,
    rows: Tensor,
    batch_size: int,
    outputs: Sequence[Sequence[Tensor]],
) -> tuple[Pairs | None, list[str]]:
    """Returns pairs of the result of an evaluation forward for one micro-batch, and in words what is not compared.

    `rows` are the samples of the micro-batch among the `batch_size` of the batch, and `outputs` the tensors with dims
    that the unsplit model returned for each part of the batch.
    A rank that holds a part of the result (classes, tokens, pixels) compares it.
    """
    if pipeline_of(model) is not None:
        return None, ["the model's result: the stages of pipe return only the loss, which is compared"]
    with in_mode(model, training=False), torch.no_grad():
        args, kwargs = arguments_of(model, objective, own_part(batch, model, mesh, objective))
        found = [own_logits(tensor) for tensor in tensors_in(model(*args, **kwargs))]
        found = [tensor for tensor in found if tensor.dim()]
    expected = [_joined(tensors, batch_size) for tensors in zip(*outputs, strict=True)]
    pairs = []
    for index, (tensor, whole) in enumerate(zip(found, expected, strict=False)):
        own = None if whole is None else _own(whole[rows], tensor, model, mesh)
        pairs += [(f"tensor {index + 1}", tensor, own)] if own is not None else []
    left_out = len(found) - len(pairs)
    words = [f"{left_out} of {len(found)} tensors of the model's result, of which ranks hold other parts"]
    compared = results(pairs, largest_of(tensor for part in outputs for tensor in part)) if pairs else None
    return compared, words * (left_out > 0)


def _joined(parts: Sequence[Tensor], batch_size: int) -> Tensor | None:
    """Returns a tensor of the result for the whole batch; None if its first dim is not the samples."""
    has_samples = sum(map(len, parts)) == batch_size and len({part.shape[1:] for part in parts}) == 1
    return torch.cat(list(parts)) if has_samples else None


def _own(expected: Tensor, found: Tensor, model: nn.Module, mesh: Mesh) -> Tensor | None:
    """Returns this rank's part of a result that has the shape of `found`; None if it is split in another way."""
    vocabulary, tiling = vocabulary_of(model), tiling_of(model)
    if mesh["context"].degree > 1 and expected.dim() > 1:
        expected = own_tokens((expected,), mesh["context"])[0]
    if vocabulary is not None and expected.shape[-1] == vocabulary.num_classes:
        expected = expected[..., vocabulary.begin : vocabulary.end]
    if tiling is not None and tiling.output == "tile" and mesh["tile"].degree > 1:
        expected = tile(expected, mesh)
    elif tiling is not None:
        expected = own_targets((expected, expected), model, mesh)[1]
    return expected if expected.shape == found.shape else None
