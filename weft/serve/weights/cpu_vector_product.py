"""Products of one row with weights of 16 bits on a CPU, by torch's product of a matrix and a vector.

On some CPUs torch's product of matrices reads such weights at half the rate. Both add up in float32 and round once. A
short measurement says which of them is faster, for each number of inputs.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from weft.inspection.annotations import Annotation
from weft.serve.weights.cpu_product import least_seconds

DTYPES = (torch.bfloat16, torch.float16)
MEASURED_BYTES = 1 << 23  # of a weight: more than the caches of a core hold

# Of a linear: is one row multiplied as a vector?
TAKES_VECTORS = Annotation[bool]("takes vectors")


def is_vector(hidden: Tensor, layer: nn.Linear) -> bool:
    """Is hidden [tokens, in] one row, and multiplied as a vector?"""
    return hidden.shape[:-1] == (1,) and TAKES_VECTORS.get(layer) is True


def plain_linear(hidden: Tensor, layer: nn.Linear, bias: Tensor | None) -> Tensor:
    """hidden [tokens, in] @ weight.T + bias, of a linear whose weight is as it was read."""
    if is_vector(hidden, layer):
        out = torch.mv(layer.weight, hidden[0]) if bias is None else torch.addmv(bias, layer.weight, hidden[0])
        return out[None]
    return F.linear(hidden, layer.weight, bias)


def takes_vectors(layer: nn.Linear) -> bool:
    """Is one row multiplied faster as a vector with the linear's weight of 16 bits?"""
    return is_faster(layer.weight.shape[1], layer.weight.dtype, torch.get_num_threads())


@cache
@torch.inference_mode()
def is_faster(num_in: int, dtype: torch.dtype, threads: int) -> bool:
    """Is a product with a vector faster than one with a matrix of one row? `threads` are those in use."""
    weight = torch.ones(max(16, MEASURED_BYTES // dtype.itemsize // num_in), num_in, dtype=dtype)
    row = torch.ones(1, num_in, dtype=dtype)
    return least_seconds(lambda: torch.mv(weight, row[0])[None]) < least_seconds(lambda: F.linear(row, weight))
