"""LayerNorm and RMSNorm of features that are split over y: moments are summed over the axis, forward and backward.

`NormMemory` has the bytes that norms save for backward on a rank of x and y, measured by running each kind of norm on a
few rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft.comm import Axis, Ledger
from weft.inspection.split_probe import TOLERANCE, random_copy
from weft.inspection.tensor_splits import is_norm
from weft.parallel.tensor.operations import enter, leave
from weft.profiling import LayerShape, Profile, ProfileCache

ALONE = Axis("y", 1, 0, None, Ledger())


_PLAIN: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()  # results of `is_plain_norm`


def split_norm(module: Any, axis: Axis, input: Tensor) -> Tensor:
    """Returns the LayerNorm or RMSNorm of this rank's features, computed in float32 at least."""
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    size = input.shape[-1] * axis.degree
    if isinstance(module, nn.LayerNorm):
        wide = wide - _sum_over(wide.sum(-1, keepdim=True), axis) / size
    variance = _sum_over(wide.square().sum(-1, keepdim=True), axis) / size
    eps = getattr(module, "eps", None) or getattr(module, "variance_epsilon", None) or torch.finfo(input.dtype).eps
    normed = (wide * torch.rsqrt(variance + eps)).to(input.dtype)
    weight, bias = getattr(module, "weight", None), getattr(module, "bias", None)
    out = normed if weight is None else normed * weight
    return out if bias is None else out + bias


def is_plain_norm(module: nn.Module, width: int) -> bool:
    """Does a norm of `width` features compute what `split_norm` does? Some add one to the weight, or norm more dims."""
    if module not in _PLAIN:
        _PLAIN[module] = _equals_split_norm(module, width)
    return _PLAIN[module]


def _equals_split_norm(module: nn.Module, width: int) -> bool:
    generator = torch.Generator().manual_seed(0)
    try:
        copy = random_copy(module, generator)
        value = torch.randn(2, 4, width, dtype=torch.float64, generator=generator)
        with torch.no_grad():
            return torch.allclose(copy(value), split_norm(copy, ALONE, value), rtol=TOLERANCE, atol=TOLERANCE)
    except Exception:  # anything that the user's code may raise
        return False


def _sum_over(value: Tensor, axis: Axis) -> Tensor:
    return enter(leave(value, axis), axis)


NUM_ROWS = 8
# By kind of norm, width, dtype and whether features are split: bytes, or the reason why it does not run on rows.
_SAVED_PER_ROW = ProfileCache[tuple[type[nn.Module], int, torch.dtype, bool], int | str]()


class NormMemory:
    """Bytes saved by the norms of a model, as a rank runs them.

    A norm of which some rows cannot be run alone (norms of channels move dims first, and some norm several dims)
    counts as the profile counted it. `assumed` states this in words.
    """

    def __init__(self, profile: Profile, dtype: torch.dtype, is_split: bool) -> None:
        """`is_split`: the norms' features are split over y."""
        self.profile, self.dtype, self.is_split = profile, dtype, is_split

    def norms_of(self, block: str) -> Iterable[tuple[str, LayerShape]]:
        """Yields the norms of a block ("" for the root) that save bytes for backward, and are not inside of regions."""
        assert self.profile.model is not None
        pairing = self.profile.pairing
        for name, layer in self.profile.layers.items():
            is_here = (pairing.block_of(name) or "") == block and layer.needs_gradient
            if is_here and is_norm(self.profile.model.get_submodule(name)) and f"{name}.weight" not in pairing.inner:
                yield name, layer

    def whole_bytes(self, name: str, layer: LayerShape, is_local: bool) -> int:
        """Returns the bytes that a norm saves for all of its rows; `is_local`: as a rank of x and y runs it."""
        per_row = self._per_row(name, layer, is_local and self.is_split)
        return layer.saved_bytes if isinstance(per_row, str) else layer.rows * per_row

    def assumed(self, blocks: Iterable[str]) -> tuple[str, ...]:
        """Returns one sentence for each reason why norms of these blocks could not be run on rows alone."""
        names: dict[str, list[str]] = {}
        for block in blocks:
            for name, layer in self.norms_of(block):
                reasons = {self._per_row(name, layer, is_split) for is_split in {False, self.is_split}}
                for reason in reasons:
                    if isinstance(reason, str):
                        names.setdefault(reason, []).append(name)
        return tuple(
            f"norm '{norms[0]}'{f' and {len(norms) - 1} more' * (len(norms) > 1)} could not be run on some rows alone "
            f"({reason}): what it saves on a rank is counted in proportion to what it saves in the whole model"
            for reason, norms in names.items()
        )

    def _per_row(self, name: str, layer: LayerShape, is_split: bool) -> int | str:
        assert self.profile.model is not None
        module = self.profile.model.get_submodule(name)
        width = layer.in_features
        key = type(module), width, self.dtype, is_split
        return _SAVED_PER_ROW.get(self.profile, key, lambda: _saved_per_row(module, width, self.dtype, is_split))


def _saved_per_row(module: nn.Module, width: int, dtype: torch.dtype, is_split: bool) -> int | str:
    """Returns the bytes that a norm saves for each row, or the reason why it does not run on rows."""
    copy = random_copy(module, torch.Generator().manual_seed(0)).to(dtype)
    held = {parameter.untyped_storage()._cdata for parameter in copy.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage()._cdata not in held:
            saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    value = torch.zeros(1, NUM_ROWS, width, dtype=dtype, requires_grad=True)
    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        try:
            out = split_norm(copy, ALONE, value) if is_split else copy(value)
        except Exception as error:  # anything that the user's code may raise; `assumed` reports it
            lines = str(error).strip().splitlines()
            return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
    del out
    return sum(saved.values()) // NUM_ROWS
