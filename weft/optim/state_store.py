"""The tensors of AdamW's state of one flat buffer: in the master dtype, in bf16, or as 8-bit codes.

Codes have a scale for each `CODE_BLOCK` elements of a part, counted from the start of the part.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.optim.update import decode, encode
from weft.sharding.flat_buffer import Flat
from weft.sharding.layout import CODE_BLOCK, ParameterPart, moment_dtype, num_scales


class MomentStore:
    """Both moments of a slice, with padding, and the step count of each part."""

    def __init__(self, flat: Flat) -> None:
        moment = moment_dtype(flat.options.state, flat.options.master_dtype)
        self.has_scales = moment is None
        parts = [part for part in flat.parts if part.stop > part.start]
        numel = flat.layout.slice_numel if parts else 0
        self.steps = torch.zeros(len(parts))
        self.tensors: tuple[Tensor, ...]
        if moment is None:
            counts = [num_scales(part) for part in parts]
            self._scale_starts = [sum(counts[:index]) for index in range(len(counts))]
            scales = [flat.state_zeros(sum(counts), torch.float32) for _ in range(2)]
            codes = flat.state_zeros(numel, torch.int8), flat.state_zeros(numel, torch.uint8)
            self.tensors = (codes[0], scales[0], codes[1], scales[1])
        else:
            self.tensors = (flat.state_zeros(numel, moment), flat.state_zeros(numel, moment))
        # Whether torch's fused kernel can update it: all tensors have one dtype, and it is not rounded.
        self.is_plain = moment == flat.options.slice_dtype != torch.bfloat16

    def at(self, index: int, part: ParameterPart, start: int, stop: int) -> tuple[Tensor, ...]:
        """Return the state of the elements [start, stop) of the slice.

        For 8-bit codes they must lie in part `index` and cover whole blocks.
        """
        if not self.has_scales:
            return tuple(tensor[start:stop] for tensor in self.tensors)
        low = self._scale_starts[index] + (start - part.offset) // CODE_BLOCK
        high = low + -(-(stop - start) // CODE_BLOCK)
        codes, scales = slice(start, stop), slice(low, high)
        return tuple(tensor[codes if place % 2 == 0 else scales] for place, tensor in enumerate(self.tensors))

    def views(self, index: int, part: ParameterPart) -> dict[str, Tensor]:
        """Return a part's state by name, as views in the stored format."""
        moments = ("exp_avg", "exp_avg_sq")
        names = [f"{one}{end}" for one in moments for end in (("", "_scale") if self.has_scales else ("",))]
        found = self.at(index, part, part.offset, part.offset + part.stop - part.start)
        return {"step": self.steps[index], **dict(zip(names, found, strict=True))}

    def read(self, index: int, part: ParameterPart) -> tuple[Tensor, Tensor]:
        """Return a part's moments: as stored, or decoded to fp32."""
        return decode(self.at(index, part, part.offset, part.offset + part.stop - part.start))

    def write(self, index: int, part: ParameterPart, first: Tensor, second: Tensor) -> None:
        """Set a part's moments."""
        encode(self.at(index, part, part.offset, part.offset + part.stop - part.start), first, second)
