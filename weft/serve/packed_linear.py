"""Linears whose weights are kept in fewer bits (`weight_formats.py`).

Those of attention and MLPs are packed, the head if asked for, and stacked experts (`packed_experts.py`). Embeddings,
norms and routers stay as they are. Parts of a packed weight are buffers of integers, so that casting a model to another
dtype does not change them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from weft.errors import ConfigError
from weft.models import GPT2, Decoder
from weft.models.attention import RMSNorm
from weft.models.decoder import Attention
from weft.models.experts import StackedExperts, SwiGLU
from weft.models.gpt2 import GPT2MLP, GPT2Attention
from weft.serve.cpu_product import CpuWeight, arranged
from weft.serve.group_codes import GroupCodes, split_ranges
from weft.serve.packed_experts import PackedExperts, PackedStack
from weft.serve.weight_formats import (
    HEAD_FORMATS,
    AfterProduct,
    Grouped,
    WeightFormat,
    refuse_bad_weight,
    weight_format,
    why_cpu_decodes,
)

PACKED_OWNERS = (Attention, SwiGLU, GPT2Attention, GPT2MLP)


class PackedLinear(nn.Linear):
    """hidden @ weight.T + bias, with the weight in fewer bits. `weight` has its shape, and no values."""

    def __init__(self, format: WeightFormat, parts: Sequence[Tensor], num_in: int, bias: Tensor | None) -> None:
        nn.Module.__init__(self)
        self.format = format
        self.for_cpu: CpuWeight | None = None  # the weight a second time (`arrange_for_cpu`)
        self.in_features, self.out_features = num_in, len(parts[0])
        for index, part in enumerate(parts):
            self.register_buffer(f"part_{index}", part)
        self.register_parameter("bias", None if bias is None else nn.Parameter(bias, requires_grad=False))

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return tuple(self._buffers.values())  # type: ignore[arg-type]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return torch.empty(self.out_features, self.in_features, device="meta")

    def product(self, hidden: Tensor) -> Tensor:
        """hidden @ weight.T."""
        if self._is_for_cpu(hidden):
            assert self.for_cpu is not None
            return self.for_cpu.product(hidden)
        return self.format.product(hidden, self.parts, AfterProduct())

    def _is_for_cpu(self, hidden: Tensor) -> bool:
        return self.for_cpu is not None and hidden.dim() == 2 and len(hidden) <= self.for_cpu.max_rows

    def why_decoded(self, dtype: torch.dtype) -> str | None:
        """Why a CPU decodes the weight for each product with inputs of a dtype; None if it does not."""
        return why_cpu_decodes(self.format, self.in_features, dtype)

    def arrange_for_cpu(self, dtype: torch.dtype) -> None:
        """Keep the weight a second time as a CPU's product with codes takes it, where that is faster."""
        self.for_cpu = None
        if isinstance(self.format, Grouped):
            codes, ranges = self.parts
            self.for_cpu = arranged(GroupCodes(codes, *split_ranges(ranges)), self.format.bits, dtype)

    def fused(
        self,
        hidden: Tensor,
        residual: Tensor | None = None,
        is_gated: bool = False,
        norm: RMSNorm | None = None,
    ) -> Tensor:
        """The linear of norm(hidden), and what follows it (`AfterProduct`)."""
        after = AfterProduct(self.bias, residual, is_gated)
        if self._is_for_cpu(hidden):
            return after.of(self.product(hidden if norm is None else norm(hidden)))
        return self.format.product(hidden, self.parts, after, norm)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.fused(hidden)

    @torch.no_grad()
    def take(self, parts: Sequence[Tensor]) -> None:
        """Take other values of the same shape."""
        for own, part in zip(self.parts, parts, strict=True):
            own.copy_(part)


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


def names_to_pack(model: nn.Module) -> Iterator[str]:
    """The names of all parameters that can be packed."""
    yield from (f"{name}.weight" for name, _ in linears_to_pack(model))
    for name, experts in experts_to_pack(model):
        yield from (f"{name}.{own}" for own, _ in experts.named_parameters())


def replace_module(model: nn.Module, name: str, packed: PackedLinear | PackedExperts) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, packed)


def make_room(model: nn.Module, format: WeightFormat) -> None:
    """Replace linears and experts on the meta device by packed ones without values."""
    for name, linear in list(linears_to_pack(model)):
        num_out, num_in = linear.weight.shape
        parts = format.empty(num_out, num_in, "meta")
        replace_module(model, name, PackedLinear(format, parts, num_in, linear.bias))
    for name, experts in list(experts_to_pack(model)):
        replace_module(model, name, PackedExperts(format, experts, "meta"))


def read_packed(model: nn.Module, read: Callable[[str], Tensor], dtype: torch.dtype) -> None:
    """Give packed linears and experts their values, of weights as they are in a dtype. `read` gives a whole parameter
    by name.
    """
    for name, module in model.named_modules():
        if isinstance(module, PackedLinear):
            weight = read(f"{name}.weight").to(module.parts[0].device, dtype)
            refuse_bad_weight(f"{name}.weight", weight)
            module.take(module.format.encode(weight))
        elif isinstance(module, PackedStack):
            module.take(name, read(name), dtype)


@torch.no_grad()
def pack_model(model: nn.Module, format: WeightFormat) -> None:
    """Pack the linears and experts of a model that has its values, each weight by itself."""
    for name, linear in list(linears_to_pack(model)):
        refuse_bad_weight(f"{name}.weight", linear.weight)
        packed = PackedLinear(format, format.encode(linear.weight), linear.weight.shape[1], linear.bias)
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
        model.lm_head = PackedLinear(form, form.encode(head.weight), head.weight.shape[1], head.bias)


def why_decoded(model: nn.Module) -> list[str]:
    """Why a CPU decodes weights of a model for each product, which takes long: a sentence for each reason."""
    dtype = next(model.parameters()).dtype
    packed = [one for one in model.modules() if isinstance(one, PackedLinear | PackedStack)]
    reasons = [one.why_decoded(dtype) for one in packed]
    return [
        f"{reasons.count(reason)} of {len(packed)} linears and stacks of experts are decoded for each product, which "
        f"saves memory and no time: {reason}"
        for reason in dict.fromkeys(reasons)
        if reason is not None
    ]


def join_packed(linears: Sequence[PackedLinear]) -> PackedLinear:
    """One linear that gives the results of all, end to end. Their parts become views of its own."""
    sizes = [len(one.parts[0]) for one in linears]
    parts = [torch.cat(same) for same in zip(*(one.parts for one in linears), strict=True)]
    biases: list[Tensor] = [one.bias for one in linears if one.bias is not None]
    bias = torch.cat(biases) if biases else None
    joined = PackedLinear(linears[0].format, parts, linears[0].in_features, bias)
    for index, part in enumerate(parts):
        for one, view in zip(linears, part.split(sizes), strict=True):
            one._buffers[f"part_{index}"] = view
    if joined.bias is not None:
        for one, view in zip(linears, joined.bias.split(sizes), strict=True):
            one.bias = nn.Parameter(view, requires_grad=False)
    return joined
