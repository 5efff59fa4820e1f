"""Which tokens of a batch are used, as routers of experts must know: all others are padding.

A token is used if a target depends on it: if it or a later token of its document (of its sequence, if documents are
joined) has a label. Rows of preferences and of packed conversations end in padding, which takes no place in an
expert with a capacity, and counts neither in the routers' losses and biases nor in what a run logs of experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from weft.mesh import Mesh
from weft.models.loss import IGNORE
from weft.models.router import routers_of, set_used
from weft.parallel.context.axis import own_tokens
from weft.parallel.tensor.operations import slice_along
from weft.pipeline.rank_model import rank_model
from weft.step.batch import Batch
from weft.step.documents import document_numbers
from weft.step.objective import Objective


def used_tokens(labels: Tensor, documents: Tensor | None = None) -> Tensor:
    """Returns which tokens of labels [sequences, sequence] are used; `documents` are the numbers of their documents."""
    length = labels.shape[1]
    places = torch.arange(length, device=labels.device).expand_as(labels)
    # The place of the first label at or behind each token; `length` if there is none.
    nearest = places.masked_fill(labels == IGNORE, length).flip(1).cummin(1).values.flip(1)
    is_used = nearest < length
    if documents is not None:
        is_used &= documents.gather(1, nearest.clamp(max=length - 1)) == documents
    return is_used


def used_of_batch(objective: Objective, model: nn.Module, models: Iterable[nn.Module], batch: Batch) -> Tensor | None:
    """Returns which tokens of a batch of whole sequences are used; None if the objective or `models`, the parts of the
    model on this rank, need not know.
    """
    if objective.positions is None or not any(routers_of(one) for one in models):
        return None
    tokens, labels = objective.positions(batch)
    return used_tokens(labels, document_numbers(model, tokens))


class UsedTokens:
    """Tells the routers of a parallel model which tokens of its micro-batches are used.

    `in_place`: the routers keep one tensor, which a CUDA graph can read.
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, objective: Objective, batches: Sequence[Batch], in_place: bool
    ) -> None:
        self._models, self._in_place = rank_model(model).models, in_place
        found = (used_of_batch(objective, model, self._models, batch) for batch in batches)
        self.masks = [None if one is None else own_tokens(one, mesh["context"]) for one in found]
        self._x = mesh["x"] if mesh.plan.tensor.sequence else None

    def tell(self, index: int) -> None:
        """Call this before each forward of micro-batch `index`."""
        mask = self.masks[index]
        if mask is not None and self._x is not None:
            mask = slice_along(mask, self._x, 1)
        set_used(self._models, mask, self._in_place)

    def end(self) -> None:
        """Call this after the last backward: the routers' next tokens are of another batch."""
        if not self._in_place:
            set_used(self._models, None)
