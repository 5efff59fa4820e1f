"""Linears whose weights are kept in fewer bits (`weight_formats.py`).

Those of attention and MLPs are packed, the head if asked for, and stacked experts (`packed_experts.py`). Embeddings,
norms and routers stay as they are. Parts of a packed weight are buffers of integers, so that casting a model to another
dtype does not change them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import GPT2, Decoder
from weft.models.attention import RMSNorm
from weft.models.decoder import Attention
from weft.models.experts import StackedExperts, SwiGLU
from weft.models.gpt2 import GPT2MLP, GPT2Attention
from weft.serve.weights.cpu_products import CpuWeight, DynamicWeight, arranged, limited, product_of, why_dequantised
from weft.serve.weights.fast_path import NOWHERE, Kernel, Place, fast_path, kernel_of
from weft.serve.weights.packed_experts import PackedExperts, PackedStack, PackedWeights
from weft.serve.weights.steps import AfterProduct, quantised_product
from weft.serve.weights.weight_formats import (
    HEAD_FORMATS,
    Grouped,
    RowInt8,
    WeightFormat,
    refuse_bad_weight,
    weight_format,
)

PACKED_OWNERS = (Attention, SwiGLU, GPT2Attention, GPT2MLP)


class PackedLinear(PackedWeights, nn.Linear):
    """hidden @ weight.T + bias, with a quantised weight. `weight` has its shape, and no values."""

    def __init__(self, format: WeightFormat, parts: Sequence[Tensor], num_in: int, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.format = format
        self.in_features, self.out_features = num_in, len(parts[0])
        self._for_cpu: CpuWeight | None = None  # the weight a second time (`arrange_for_cpu`)
        self.choose(NOWHERE)
        for index, part in enumerate(parts):
            self.register_buffer(f"part_{index}", part)
        self.has_bias = bias is not None  # to ask the module for its bias takes longer
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.empty(self.out_features, self.in_features, device="meta")

    def choose(self, place: Place) -> None:
        """Choose the kernels of products with hidden states in a place. Until then, they are plain functions."""
        self._place = place
        self.paths = fast_path("linear", place, self.format, (self.out_features, self.in_features), self.max_rows)

    def arrange_for_cpu(self, dtype: torch.dtype) -> None:
        """Keep the weight a second time as a CPU's product with codes takes it, where that is faster."""
        self.for_cpu = arranged(self.format, self.parts, dtype)

    @property
    def for_cpu(self) -> CpuWeight | None:
        return self._for_cpu

    @for_cpu.setter
    def for_cpu(self, weight: CpuWeight | None) -> None:
        self._for_cpu = weight
        self.choose(self._place)

    @property
    def max_rows(self) -> int:
        """The most rows of a product with codes on a CPU; 0 if all products dequantise the weight."""
        return 0 if self._for_cpu is None else self._for_cpu.max_rows

    def limit_rows(self, max_rows: int) -> None:
        """Use products with codes for at most so many rows."""
        self.for_cpu = limited(self._for_cpu, max_rows)

    def multiply(self, hidden: Tensor, kernel: Kernel, after: AfterProduct, norm: RMSNorm | None = None) -> Tensor:
        """Return norm(hidden) [rows, in] @ weight.T by a kernel, and what follows. The kernel must have the norm."""
        if kernel == "codes":
            assert self._for_cpu is not None
            return after.of(self._for_cpu.product(hidden))
        return quantised_product(kernel, self.format, hidden, self.parts, after, norm)

    def forward(self, hidden: Tensor) -> Tensor:
        kernel = kernel_of(self.paths, len(hidden)) if hidden.dim() == 2 else "dequantise"
        return self.multiply(hidden, kernel, AfterProduct(self.bias if self.has_bias else None))

    def read(self, name: str, weight: Tensor) -> None:
        """Take the values of a whole weight that is named so. Raises NumbersError."""
        refuse_bad_weight(name, weight)
        self.take_parts(self.format.quantise(weight))


def linears_to_pack(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """The linears that can be packed, by name."""
    for owner_name, owner in model.named_modules():
        if isinstance(owner, PACKED_OWNERS):
            for name, linear in owner.named_children():
                if isinstance(linear, nn.Linear):
                    yield f"{owner_name}.{name}", linear


def experts_to_pack(model: nn.Module) -> Iterator[tuple[str, StackedExperts]]:
    """The stacked experts, by name."""
    for name, module in model.named_modules():
        if isinstance(module, StackedExperts):
            yield name, module


def names_to_pack(model: nn.Module, with_experts: bool = True) -> Iterator[str]:
    """The names of all parameters that can be packed."""
    yield from (f"{name}.weight" for name, _ in linears_to_pack(model))
    for name, experts in experts_to_pack(model) if with_experts else ():
        yield from (f"{name}.{own}" for own, _ in experts.named_parameters())


def replace_module(model: nn.Module, name: str, packed: PackedLinear | PackedExperts) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, packed)


def make_room(model: nn.Module, format: WeightFormat, with_experts: bool = True) -> None:
    """Replace linears and experts on the meta device by packed ones without values."""
    for name, linear in list(linears_to_pack(model)):
        make_room_for_linear(model, name, linear, format)
    if with_experts:
        make_room_for_experts(model, format)


def make_room_for_linear(model: nn.Module, name: str, linear: nn.Linear, format: WeightFormat) -> None:
    """Replace a linear on the meta device by a packed one without values."""
    num_out, num_in = linear.weight.shape
    replace_module(model, name, PackedLinear(format, format.empty(num_out, num_in, "meta"), num_in, linear.bias))


def make_room_for_experts(model: nn.Module, format: WeightFormat) -> None:
    """Replace experts on the meta device by packed ones without values."""
    for name, experts in list(experts_to_pack(model)):
        replace_module(model, name, PackedExperts(format, experts, "meta"))


@torch.no_grad()
def pack_model(model: nn.Module, format: WeightFormat) -> None:
    """Pack the linears and experts of a model that has its values, each weight by itself."""
    for name, linear in list(linears_to_pack(model)):
        refuse_bad_weight(f"{name}.weight", linear.weight)
        packed = PackedLinear(format, format.quantise(linear.weight), linear.weight.shape[1], linear.bias)
        replace_module(model, name, packed)
    for name, experts in list(experts_to_pack(model)):
        stacked = PackedExperts(format, experts, experts.down_proj.device)
        for own, stack in stacked.stacks.items():
            weights = experts.get_parameter(own)
            stack.take(f"{name}.{own}", weights, weights.dtype)
        replace_module(model, name, stacked)


@torch.no_grad()
def pack_head(model: nn.Module, name: str | None, device: torch.device | str) -> None:
    """Keep the weight of the head in a format of integers if --head names one. An embedding that it shares stays."""
    if name not in HEAD_FORMATS:
        return
    if torch.device(device).type != "cpu" or not isinstance(model, Decoder | GPT2):
        raise ConfigError(
            f"--head {name} is for models of attention on CPUs, not for a {type(model).__name__} on {device}; leave it "
            f"out"
        )
    head = model.lm_head
    if isinstance(head, nn.Linear):  # only the last stage has one
        refuse_bad_weight("lm_head.weight", head.weight)
        form = weight_format(name)
        model.tied_to = None
        model.lm_head = PackedLinear(form, form.quantise(head.weight), head.weight.shape[1], head.bias)


def choose_kernels(model: nn.Module, place: Place) -> None:
    """Choose the kernels of all quantised weights, for hidden states in a place."""
    for module in model.modules():
        if isinstance(module, PackedLinear | PackedStack | PackedExperts):
            module.choose(place)


def what_cpus_do(model: nn.Module) -> list[str]:
    """Return what a user should know of a CPU's products with packed weights: a sentence for each reason to dequantise
    weights, which takes long, and one where inputs are rounded.
    """
    dtype = next(model.parameters()).dtype
    packed = [one for one in model.modules() if isinstance(one, PackedLinear | PackedStack)]
    what = "linears and stacks of experts" if any(isinstance(one, PackedStack) for one in packed) else "linears"
    reasons = [why_dequantised(one.format, one.in_features, dtype) for one in packed]
    said = [
        f"{reasons.count(reason)} of {len(packed)} {what} are dequantised for each product, which saves memory and no "
        f"time: {reason}"
        for reason in dict.fromkeys(reasons)
        if reason is not None
    ]
    by_codes = [one for one, reason in zip(packed, reasons, strict=True) if reason is None]
    rounded = sum(product_of(one.format) is DynamicWeight for one in by_codes)
    if rounded:
        said.append(
            f"{rounded} of {len(packed)} {what} round the inputs of decodes to 8 bits, each token's between its least "
            f"and largest: this CPU's product of bytes takes no others"
        )
    by_rows = sum(isinstance(one.format, Grouped | RowInt8) for one in by_codes)
    if by_rows:
        said.append(
            f"{by_rows} of {len(packed)} {what} round few rows of a step otherwise than many, of which the weight is "
            f"dequantised: an answer may depend on the requests beside it, on drafts and on the number of ranks"
        )
    return said


def end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """Return one tensor with the rows of all, end to end. It has their memory if they lie so already."""
    first = tensors[0].detach()
    place, memory = first.storage_offset(), first.untyped_storage()._cdata
    for one in tensors:
        if one.untyped_storage()._cdata != memory or one.storage_offset() != place or not one.is_contiguous():
            return torch.cat([one.detach() for one in tensors])
        place += one.numel()
    rows = sum(len(one) for one in tensors)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def join_packed(linears: Sequence[PackedLinear]) -> PackedLinear:
    """Return one linear that gives the results of all, end to end. Their parts become views of its own."""
    sizes = [len(one.parts[0]) for one in linears]
    parts = [end_to_end(same) for same in zip(*(one.parts for one in linears), strict=True)]
    biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    bias = end_to_end(biases) if biases else None
    joined = PackedLinear(linears[0].format, parts, linears[0].in_features, bias)
    for index, part in enumerate(parts):
        for one, view in zip(linears, part.split(sizes), strict=True):
            one._buffers[f"part_{index}"] = view
    if joined.bias is not None:
        for one, view in zip(linears, joined.bias.split(sizes), strict=True):
            one.bias = nn.Parameter(view, requires_grad=False)
    return joined
