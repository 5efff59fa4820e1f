"""Follows the size of gradients, by blocks of elements, so that a second moment that is no longer renewed keeps up.

1-bit and 0/1 Adam stop renewing the second moment, because that needs gradients in full precision. Gradients become
smaller while a model learns, so updates would become too small with them. What changes is mostly the size of gradients
and less their proportions within a block. So ranks exchange the mean square of each block of their own gradients, one
number for 64 elements. A running mean of it, with the same decay as the second moment's, is the block's size. After the
freeze, the second moment is multiplied by the change of that size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 64
_SMALLEST = 1e-30  # a size of 0 would end the updates of a block for ever


def num_blocks(numel: int) -> int:
    """Returns the blocks of a slice with so many elements."""
    return -(-numel // BLOCK)


def block_squares(gradient: Tensor) -> Tensor:
    """Returns the mean square of each block of a gradient [numel]: [blocks], in float32 or wider."""
    numel = gradient.numel()
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    padded = F.pad(wide.square(), (0, -numel % BLOCK))
    sums = padded.view(-1, BLOCK).sum(1)
    if numel % BLOCK:
        sums[-1] *= BLOCK / (numel % BLOCK)
    return sums / BLOCK


class GradientSize:
    """The size of one slice's gradients, by block, not corrected for its start at 0. 0: not known yet."""

    def __init__(self, numel: int, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.numel = numel
        self.sizes = torch.zeros(num_blocks(numel), dtype=dtype, device=device)

    def renew(self, squares: Tensor, decay: float, count: int, num_steps: int = 1) -> Tensor:
        """Take in the mean squares of `num_steps` steps, the last of which is number `count` of all. Returns by which
        factor the size of each block has changed.
        """
        before = self.sizes / (1 - decay ** (count - num_steps)) if count > num_steps else torch.zeros_like(self.sizes)
        share = (1 - decay**num_steps) / (1 - decay**count)
        is_known = before > 0
        after = torch.where(is_known, before.lerp(squares, share), squares).clamp(min=_SMALLEST)
        self.sizes.copy_(after * (1 - decay**count))
        return torch.where(is_known, after / torch.where(is_known, before, 1.0), 1.0)

    def spread(self, blocks: Tensor) -> Tensor:
        """Returns a value for each block as one for each element."""
        return blocks.repeat_interleave(BLOCK)[: self.numel]

    def gather(self, blocks: Tensor, place: slice, values: Tensor) -> None:
        """Set the values of blocks from values of the elements at `place`, as `spread` made them.

        Under another plan blocks begin elsewhere; a block then has the mean of its elements.
        """
        indices = torch.arange(place.start, place.stop, device=blocks.device) // BLOCK
        sums = torch.zeros_like(blocks, dtype=torch.float64)  # equal values have themselves as their mean, to the bit
        counts = torch.zeros_like(sums)
        sums.index_add_(0, indices, values.to(blocks.device, torch.float64))
        counts.index_add_(0, indices, torch.ones_like(indices, dtype=torch.float64))
        blocks.copy_(torch.where(counts > 0, (sums / counts.clamp(min=1)).to(blocks.dtype), blocks))
