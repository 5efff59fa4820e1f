"""Products with weights in groups of 4 or 8 bits on an ARM CPU, by torch's product of bytes and 4-bit codes (KleidiAI).

It rounds each row of inputs to 8 bits between its least and largest number (dynamic quantisation), so that CPUs with
dot products of bytes multiply integers. Scales of several groups are rounded to bf16. Codes of 8 bits are two digits
of 4:

    code * scale + least = (code - 8) * scale + (least + 8 * scale)

The first part is the product, the second a small one in float32 with the sums of each group's inputs.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from weft.serve.weights.group_codes import GroupCodes, pack, unpack

ROW_BLOCK = 8  # outputs that lie side by side
ROW_BYTES = 8  # of an output beside codes and scales: the sum of its weights, and a bias


@dataclass(frozen=True)
class DynamicWeight:
    """A weight [out, in] as torch's product takes it: the codes and scales of each 4 bits, and what a group's codes
    stand for in the middle of their range, [groups, out].
    """

    digits: tuple[Tensor, ...]
    middles: Tensor
    group: int
    max_rows: int  # more are computed faster by the plain function

    def product(self, hidden: Tensor) -> Tensor:
        """hidden [rows, in] @ weight.T."""
        given, num_in, num_out = hidden.float(), hidden.shape[1], self.middles.shape[1]
        first, *lower = self.digits
        out = torch._dyn_quant_matmul_4bit(given, first, self.group, num_in, num_out)
        for digits in lower:
            out += torch._dyn_quant_matmul_4bit(given, digits, self.group, num_in, num_out)
        return out.addmm_(given.unflatten(1, (-1, self.group)).sum(2), self.middles).to(hidden.dtype)


def dynamic_weight(coded: GroupCodes, bits: int, max_rows: int) -> DynamicWeight:
    """The weight that codes [out, in * bits / 8] stand for."""
    group = coded.codes.shape[1] * 8 // bits // coded.scale.shape[1]
    codes, scale, least = unpack(coded.codes, bits, group), coded.scale.float(), coded.least.float()
    if bits == 4:
        digits, middles = (_digits(codes, scale, group),), least + 8 * scale
    else:
        digits = (_digits(codes >> 4, 16 * scale, group), _digits(codes & 15, scale, group))  # type: ignore[assignment]
        middles = least + (8 * 16 + 8) * scale
    return DynamicWeight(digits, middles.T.contiguous(), group, max_rows)


def arranged_bytes(num_out: int, num_in: int, group: int, bits: int) -> int:
    """Bytes of a `DynamicWeight`."""
    groups, rows = num_in // group, num_out + -num_out % ROW_BLOCK
    scales = 4 if groups == 1 else 2 * groups
    return bits // 4 * rows * (num_in // 2 + scales + ROW_BYTES) + 4 * num_out * groups


def _digits(codes: Tensor, scale: Tensor, group: int) -> Tensor:
    """(codes - 8) * scale, as torch's product takes it. The first of two neighbours lies in the low half of a byte."""
    num_out, num_in = codes.shape
    pairs = codes[:, ::2] | (codes[:, 1::2] << 4)
    scale = scale if group == num_in else scale.to(torch.bfloat16)  # torch has another product for one group
    return torch._dyn_quant_pack_4bit_weight(pairs, scale, None, group, num_in, num_out)


@cache
def has_product() -> bool:
    """Has this torch the product, and does it give what it should on this CPU?"""
    kleidi = getattr(torch.backends, "kleidiai", None)
    if platform.machine().lower() not in ("aarch64", "arm64") or kleidi is None or not kleidi.is_available():
        return False
    codes, one = torch.arange(16 * 64).view(16, 64) % 16, torch.ones(16, 2)
    try:
        coded = GroupCodes(pack(codes.to(torch.uint8), 4, 32), one.half(), one.half())
        found = dynamic_weight(coded, 4, 1).product(torch.eye(64))
    except (AttributeError, NotImplementedError, RuntimeError):
        return False
    return torch.allclose(found.T, codes + 1.0, atol=1e-3)
