"""Rules of gradients: optimizers pass over parameters that no rank has one of, and autograd must not reach pieces.

torch's optimizers pass over a parameter without a gradient. Ranks find out without communication: a rank that has no
gradient of a parameter gives -0.0 to the sum over ranks. It is the identity of addition: x + -0.0 is x for every x, 0.0
and -0.0 too. So the sum is -0.0 in every element if no rank has a gradient, and else the sum of those that there are. A
rank looks only at parameters that it has no gradient of itself. (A gradient that is -0.0 in every element, on other
ranks and not on this one, is taken for none.)
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.sharding.layout import ParameterPart


def unused_pieces(
    gradient: Tensor,
    parts: Sequence[ParameterPart],
    pieces: Sequence[nn.Parameter],
    received: Collection[int],
    before: frozenset[int],
) -> frozenset[int]:
    """Returns the ids of pieces whose parameters have no gradient on any rank.

    `gradient` is the sum over ranks, in which `parts` say where the piece of each parameter lies. `received` are the
    parameters that this rank has a gradient of. A step that is being recorded as a CUDA graph keeps the result of the
    step `before`.
    """
    if gradient.is_cuda and torch.cuda.is_current_stream_capturing():
        return before
    indices = [i for i, part in enumerate(parts) if i not in received and part.stop > part.start]
    sums = [gradient[parts[i].offset : parts[i].offset + parts[i].stop - parts[i].start] for i in indices]
    flags = torch.stack([(one.signbit() & (one == 0)).all() for one in sums]).tolist() if sums else []
    return frozenset(id(pieces[i]) for i, is_unused in zip(indices, flags, strict=True) if is_unused)


def refuse_gradient(name: str, _: Tensor) -> None:
    """Raise a PlanError: a piece, which is not what a block computes with, got a gradient."""
    raise PlanError(
        f"parameter '{name}' got a gradient outside the forward of its block; call the block (not its .forward, nor "
        f"its parameters), and add penalties on parameters through the optimizer (weight_decay)"
    )
