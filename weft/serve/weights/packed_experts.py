"""Stacked experts whose weights are kept in fewer bits (`weight_formats.py`).

A stack [experts, out, in] is kept as the parts of its weights, stacked. On GPUs, one kernel multiplies the rows of all
experts and reads the codes of those that were chosen (`expert_kernel.py`). The plain function takes one expert
after the other, and decodes those that have rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from weft.models.expert_rows import sort_by_expert, through_experts
from weft.models.experts import StackedExperts
from weft.serve.weights.cpu_products import CpuWeight, arranged, limited
from weft.serve.weights.fast_path import NOWHERE, Place, fast_path, kernel_of
from weft.serve.weights.steps import AfterProduct, quantised_product
from weft.serve.weights.weight_formats import WeightFormat, refuse_bad_weight


class PackedWeights(nn.Module):
    """A module whose buffers are the parts of quantised weights."""

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers.values())  # type: ignore[arg-type]

    @torch.no_grad()
    def take_parts(self, parts: Sequence[Tensor]) -> None:
        """Take the parts of other weights of the same shape."""
        for own, part in zip(self.parts, parts, strict=True):
            own.copy_(part)


class PackedStack(PackedWeights):
    """Quantised weights [experts, out, in]. It has the name of the parameter that it stands for."""

    def __init__(self, format: WeightFormat, shape: Sequence[int], device: torch.device | str) -> None:
        super().__init__()
        self.format, self.shape, self.in_features = format, tuple(shape), shape[-1]
        self.for_cpu: list[CpuWeight | None] = []  # the weights a second time (`arrange_for_cpu`)
        self.choose(NOWHERE)
        num_experts, num_out, num_in = shape
        for index, part in enumerate(format.empty(num_experts * num_out, num_in, device)):
            self.register_buffer(f"part_{index}", part.view(num_experts, num_out, -1))

    def parts_of(self, expert: int) -> tuple[Tensor, ...]:
        return tuple(part[expert] for part in self.parts)

    @torch.no_grad()
    def take(self, name: str, weights: Tensor, dtype: torch.dtype, device: torch.device | str | None = None) -> None:
        """Take the values of a parameter of this name, as they are in a dtype. Its experts come to the device one by
        one, or to another one where they are rounded.
        """
        for expert, weight in enumerate(weights):
            given = weight.to(device or self.parts[0].device, dtype)
            refuse_bad_weight(f"{name}[{expert}]", given)
            self.take_expert(expert, self.format.quantise(given))

    @torch.no_grad()
    def take_expert(self, expert: int, parts: Sequence[Tensor]) -> None:
        """Take the parts of the weight of an expert."""
        for own, part in zip(self.parts_of(expert), parts, strict=True):
            own.copy_(part)

    def fused(self, expert: int, rows: Tensor, after: AfterProduct = AfterProduct()) -> Tensor:  # noqa: B008
        """rows @ weight.T of an expert, and what follows."""
        for_cpu = self.for_cpu[expert] if self.for_cpu else None
        if for_cpu is not None and len(rows) <= for_cpu.max_rows:
            return after.of(for_cpu.product(rows))
        return quantised_product(kernel_of(self.paths, len(rows)), self.format, rows, self.parts_of(expert), after)

    def choose(self, place: Place) -> None:
        """Choose the kernels of products with one expert. Until then, they are plain functions."""
        self.paths = fast_path("linear", place, self.format, (self.shape[1], self.shape[2]))

    def arrange_for_cpu(self, dtype: torch.dtype) -> None:
        """Keep the weights a second time as a CPU's product with codes takes them, where that is faster."""
        self.for_cpu = [arranged(self.format, self.parts_of(expert), dtype) for expert in range(self.shape[0])]

    @property
    def max_rows(self) -> int:
        """The most rows of a product with codes on a CPU; 0 if all products decode the weights."""
        return min((0 if one is None else one.max_rows for one in self.for_cpu), default=0)

    def limit_rows(self, max_rows: int) -> None:
        """Use products with codes for at most so many rows."""
        self.for_cpu = [limited(one, max_rows) for one in self.for_cpu]


class PackedExperts(nn.Module):
    """`StackedExperts` in fewer bits."""

    def __init__(self, format: WeightFormat, experts: StackedExperts, device: torch.device | str) -> None:
        """Room for the weights of experts, without values."""
        super().__init__()
        self.format = format
        self.gate_up_proj = PackedStack(format, experts.gate_up_proj.shape, device)
        self.down_proj = PackedStack(format, experts.down_proj.shape, device)
        self.has_kernel = False

    def choose(self, place: Place) -> None:
        """Choose between the kernel of all experts and plain functions. Until then, these are used."""
        sizes = (self.gate_up_proj.in_features, self.down_proj.in_features)
        self.has_kernel = fast_path("experts", place, self.format, sizes)[0][1] == "kernel"

    @property
    def stacks(self) -> dict[str, PackedStack]:
        """By the names of the parameters."""
        return {"gate_up_proj": self.gate_up_proj, "down_proj": self.down_proj}

    @property
    def num_experts(self) -> int:
        return self.gate_up_proj.shape[0]

    def forward(self, rows: Tensor, ends: Tensor | None = None) -> Tensor:
        """Return the results of rows [rows, hidden], which are sorted by expert; expert i's end before row
        `ends[i]`.
        """
        assert ends is not None, "there is no capacity in serving"
        if self.has_kernel:
            from weft.serve.weights.expert_kernel import sorted_rows_by_kernel

            return sorted_rows_by_kernel(rows, ends, self)
        results, begin = torch.zeros_like(rows), 0
        for expert, end in enumerate(ends.tolist()):
            if end > begin:
                inner = self.gate_up_proj.fused(expert, rows[begin:end], AfterProduct(is_gated=True))
                results[begin:end] = self.down_proj.fused(expert, inner)
            begin = end
        return results

    def of_tokens(self, tokens: Tensor, weights: Tensor, chosen: Tensor, residual: Tensor | None = None) -> Tensor:
        """For tokens [tokens, hidden] the sums of the results of their chosen experts [tokens, k], times the weights
        [tokens, k], and plus the residual if there is one.
        """
        if self.has_kernel:
            from weft.serve.weights.expert_kernel import tokens_by_kernel

            return tokens_by_kernel(tokens, weights, chosen, self, residual)
        out = through_experts(tokens, weights, sort_by_expert(chosen, self.num_experts), self)
        return out if residual is None else residual + out
