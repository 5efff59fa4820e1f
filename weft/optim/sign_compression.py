"""The mean of a vector over an axis in one bit per element and direction, with error feedback.

Each rank sends the signs of its vector and one scale. Elements have weights that all ranks know: a sign stands for the
scale times the element's weight, and the scale is the mean of the absolute elements over their weights. With equal
weights that is 1-bit Adam's own compression; with the root of the second moment, elements with small gradients are not
drowned by those with large ones. The mean leaves the smallest error that any scale can, which is always smaller than
the vector. The root mean square, which is used elsewhere, can leave an error larger than the vector if a few elements
are much larger than the others. What signs leave out is kept as an error and added to the next vector. Rank i is the
server of part i: it averages what all ranks sent of that part, compresses the mean in the same way, with an error of
its own, and sends it to all. A vector of n elements over p ranks needs an all-to-all and an all-gather of
p · (n / 8p + 4) bytes each (Tang et al., 1-bit Adam, ICML 2021).

Elements of weight 0 are 0 in the result: signs cannot say 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, Key, Traffic, Traffics, add_traffic, all_gather, all_to_all
from weft.optim.gradient_size import num_blocks

SCALE_BYTES = 4  # a float32 behind the signs of each part
_NORM_BYTES = 8  # the squared norm of a rank's gradients
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def part_numel(numel: int, degree: int) -> int:
    """Returns the elements of the part that each of `degree` ranks serves: equal for all, and whole bytes of signs."""
    return -(-numel // (8 * degree)) * 8


def message_bytes(numel: int, degree: int) -> int:
    """Returns the bytes of the all-to-all, and of the all-gather, of one mean, as the ledger counts them."""
    return degree * (part_numel(numel, degree) // 8 + SCALE_BYTES)


def compressed_traffic(traffic: Traffics, degree: int, item_bytes: int) -> dict[Key, Traffic]:
    """Returns the traffic of a step whose all-reduces of slices over `data`, with so many bytes an element, are
    compressed: the signs of each slice, the size of gradients by block (`gradient_size.py`) and their norm.
    """
    found: list[Traffics] = [{key: value for key, value in traffic.items() if key != ("data", "all_reduce")}]
    sizes = traffic[("data", "all_reduce")].sizes if ("data", "all_reduce") in traffic else {}
    for num_bytes, calls in sizes.items():
        each = message_bytes(num_bytes // item_bytes, degree)
        found += [{("data", name): Traffic(calls, calls * each)} for name in ("all_to_all", "all_gather")]
    if sizes:
        blocks = sum(calls * num_blocks(num_bytes // item_bytes) for num_bytes, calls in sizes.items())
        found += [{("data", "all_reduce"): Traffic(1, each)} for each in (_NORM_BYTES, item_bytes * blocks)]
    return add_traffic(*found)


def pack_signs(values: Tensor) -> Tensor:
    """Packs the signs of [..., 8 n] into bits of [..., n] uint8. The sign of 0 is +."""
    bits = (values >= 0).view(*values.shape[:-1], -1, 8).to(torch.uint8)
    return (bits * torch.tensor(_BITS, dtype=torch.uint8, device=values.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor) -> Tensor:
    """Unpacks [..., n] uint8 to +1 and -1 of [..., 8 n] float32."""
    bits = packed.unsqueeze(-1).bitwise_and(torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)).ne(0)
    return (bits.float() * 2 - 1).flatten(-2)


class SignCompressor:
    """Averages vectors of one size and dtype over an axis. The errors are state: they belong into a checkpoint."""

    def __init__(self, numel: int, axis: Axis, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.axis, self.numel, self._part = axis, numel, part_numel(numel, axis.degree)
        self.worker_error = torch.zeros(numel, dtype=dtype, device=device)
        self.server_error = torch.zeros(self._part, dtype=dtype, device=device)

    def clear(self) -> None:
        """Forget the errors, because another quantity is compressed from now on."""
        self.worker_error.zero_()
        self.server_error.zero_()

    def mean(self, vector: Tensor, weights: Tensor) -> Tensor:
        """Returns the compressed mean of `vector` [numel] over the axis, 0 where `weights` [numel] are. Equal on all
        ranks; the weights must be, too.
        """
        degree, part = self.axis.degree, self._part
        padded = self.server_error.new_zeros(degree * part)
        padded[: self.numel] = weights
        own = padded.view(degree, part)[self.axis.index]
        given = vector.to(padded.dtype) + self.worker_error
        scale = _scale(given, padded[: self.numel])
        given = torch.where(padded[: self.numel] > 0, given, 0.0)
        self.worker_error.copy_(given - scale * padded[: self.numel] * _signs(given))
        filled = given.new_zeros(degree * part)
        filled[: self.numel] = given
        sent = _message(pack_signs(filled.view(degree, part)), scale)
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.axis).wait()
        mean = torch.zeros_like(self.server_error)
        for row in received:  # in the order of ranks, so that the sum has the same bits everywhere
            mean += _values(row, own)
        mean = torch.where(own > 0, mean / degree + self.server_error, 0.0)
        scale = _scale(mean, own)
        self.server_error.copy_(mean - scale * own * _signs(mean))
        answer = _message(pack_signs(mean).unsqueeze(0), scale)
        whole = answer.new_empty(degree, answer.shape[1])
        all_gather(whole.view(-1), answer.view(-1), self.axis).wait()
        parts = zip(whole, padded.view(degree, part), strict=True)
        return torch.cat([_values(row, theirs) for row, theirs in parts])[: self.numel]


def _scale(values: Tensor, weights: Tensor) -> Tensor:
    """Returns the mean of absolute values over weights, of the elements with a weight."""
    has_weight = weights > 0
    relative = torch.where(has_weight, values / torch.where(has_weight, weights, 1.0), 0.0)
    return relative.double().abs().sum().div(has_weight.sum().clamp(min=1)).float()


def _signs(values: Tensor) -> Tensor:
    return (values >= 0).float() * 2 - 1


def _message(signs: Tensor, scale: Tensor) -> Tensor:
    """Returns rows of signs, each followed by the scale."""
    tail = scale.view(1).view(torch.uint8).expand(signs.shape[0], SCALE_BYTES)
    return torch.cat([signs, tail], dim=1)


def _values(row: Tensor, weights: Tensor) -> Tensor:
    """Returns the signs of one row of a message, times their scale and weights."""
    scale = row[-SCALE_BYTES:].clone().view(torch.float32)
    return scale * weights * unpack_signs(row[:-SCALE_BYTES])
