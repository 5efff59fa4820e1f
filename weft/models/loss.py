"""The training loss as a sum and a count, so that every layout can normalise by the global number of tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE = -100  # a label that takes no part in the loss


def token_loss(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the positions whose label is not IGNORE, and the number of such positions.

    logits [batch, sequence, vocab]; labels [batch, sequence], already shifted: labels[t] is the target of position t.
    Computed in at least float32. With no valid position the sum is 0 and the count is 0.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, -2)  # [positions, vocab]
    total = F.cross_entropy(wide, labels.flatten(), ignore_index=IGNORE, reduction="sum")
    return total, (labels != IGNORE).sum()
