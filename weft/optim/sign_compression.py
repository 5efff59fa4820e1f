"""The mean of a vector over an axis in one bit per element and direction, with error feedback.

Each rank sends the signs of its vector and one scale (its root mean square). What that leaves out is kept as an error
and added to the next vector. Rank i is the server of part i: it averages what all ranks sent of that part, compresses
the mean in the same way, with an error of its own, and sends it to all. A vector of n elements over p ranks needs an
all-to-all and an all-gather of p · (n / 8p + 4) bytes each (Tang et al., 1-bit Adam, ICML 2021).

Elements that are left out by a mask are 0 in the result: signs cannot say 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.comm import Axis, Key, Traffic, Traffics, add_traffic, all_gather, all_to_all

SCALE_BYTES = 4  # a float32 behind the signs of each part
_NORM_BYTES = 8  # the squared norm of a rank's gradients
_BITS = (1, 2, 4, 8, 16, 32, 64, 128)


def part_numel(numel: int, degree: int) -> int:
    """Elements of the part that each of `degree` ranks serves: equal for all, and whole bytes of signs."""
    return -(-numel // (8 * degree)) * 8


def message_bytes(numel: int, degree: int) -> int:
    """Bytes of the all-to-all, and of the all-gather, of one mean, as the ledger counts them."""
    return degree * (part_numel(numel, degree) // 8 + SCALE_BYTES)


def compressed_traffic(traffic: Traffics, degree: int, item_bytes: int) -> dict[Key, Traffic]:
    """The traffic of a step whose all-reduces of slices over `data`, with so many bytes an element, are compressed."""
    found: list[Traffics] = [{key: value for key, value in traffic.items() if key != ("data", "all_reduce")}]
    sizes = traffic[("data", "all_reduce")].sizes if ("data", "all_reduce") in traffic else {}
    for num_bytes, calls in sizes.items():
        each = message_bytes(num_bytes // item_bytes, degree)
        found += [{("data", name): Traffic(calls, calls * each)} for name in ("all_to_all", "all_gather")]
    if sizes:
        found.append({("data", "all_reduce"): Traffic(1, _NORM_BYTES)})
    return add_traffic(*found)


def pack_signs(values: Tensor) -> Tensor:
    """Signs of [..., 8 n] as bits of [..., n] uint8. The sign of 0 is +."""
    bits = (values >= 0).view(*values.shape[:-1], -1, 8).to(torch.uint8)
    return (bits * torch.tensor(_BITS, dtype=torch.uint8, device=values.device)).sum(-1, dtype=torch.uint8)


def unpack_signs(packed: Tensor) -> Tensor:
    """[..., n] uint8 to +1 and -1 of [..., 8 n] float32."""
    bits = packed.unsqueeze(-1).bitwise_and(torch.tensor(_BITS, dtype=torch.uint8, device=packed.device)).ne(0)
    return (bits.float() * 2 - 1).flatten(-2)


class SignCompressor:
    """Averages vectors of one size over an axis. The errors are state: they belong into a checkpoint."""

    def __init__(self, numel: int, axis: Axis, device: torch.device) -> None:
        self.axis, self.numel, self._part = axis, numel, part_numel(numel, axis.degree)
        self.worker_error = torch.zeros(numel, device=device)
        self.server_error = torch.zeros(self._part, device=device)

    def clear(self) -> None:
        """Forget the errors, because another quantity is compressed from now on."""
        self.worker_error.zero_()
        self.server_error.zero_()

    def mean(self, vector: Tensor, mask: Tensor) -> Tensor:
        """The compressed mean of `vector` [numel] over the axis, 0 where `mask` [numel] is false. Equal on all ranks;
        the mask must be, too.
        """
        degree, part = self.axis.degree, self._part
        padded = mask.new_zeros(degree * part)
        padded[: self.numel] = mask
        masks = padded.view(degree, part)
        given = torch.where(mask, vector.float() + self.worker_error, 0.0)
        scale = _scale(given, mask)
        self.worker_error.copy_(torch.where(mask, given - scale * _signs(given), 0.0))
        filled = given.new_zeros(degree * part)
        filled[: self.numel] = given
        sent = _message(pack_signs(filled.view(degree, part)), scale)
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.axis).wait()
        mean = torch.zeros_like(self.server_error)
        for row in received:  # in the order of ranks, so that the sum has the same bits everywhere
            mean += _values(row)
        own = masks[self.axis.index]
        mean = torch.where(own, mean / degree + self.server_error, 0.0)
        scale = _scale(mean, own)
        self.server_error.copy_(torch.where(own, mean - scale * _signs(mean), 0.0))
        answer = _message(pack_signs(mean).unsqueeze(0), scale)
        whole = answer.new_empty(degree, answer.shape[1])
        all_gather(whole.view(-1), answer.view(-1), self.axis).wait()
        result = torch.cat([_values(row) for row in whole])[: self.numel]
        return torch.where(mask, result, 0.0)


def _scale(values: Tensor, mask: Tensor) -> Tensor:
    """The root mean square of the elements of the mask, the others of which are 0."""
    return values.double().square().sum().div(mask.sum().clamp(min=1)).sqrt().float()


def _signs(values: Tensor) -> Tensor:
    return (values >= 0).float() * 2 - 1


def _message(signs: Tensor, scale: Tensor) -> Tensor:
    """Rows of signs, each followed by the scale."""
    tail = scale.view(1).view(torch.uint8).expand(signs.shape[0], SCALE_BYTES)
    return torch.cat([signs, tail], dim=1)


def _values(row: Tensor) -> Tensor:
    """Signs times their scale, of one row of a message."""
    scale = row[-SCALE_BYTES:].clone().view(torch.float32)
    return unpack_signs(row[:-SCALE_BYTES]) * scale
