"""The communication of branches whose ranks have the same samples, with its backward: fork a tensor, and exchange
results.

    fork       forward: nothing                      backward: all-reduce of the gradients
    exchange   forward: all-gather of all results    backward: nothing; each rank goes on with the gradients of its own

In an exchange every rank gives a part of the same size, which has its results one after another, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce
from weft.parallel.branch.schedule import BranchExchange, SentTensor

Enter = Callable[[], None] | None  # called where backward enters a block of the model


class _Fork(Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, enter: Enter, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.axis, ctx.enter = axis, enter
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.enter is not None:
            ctx.enter()
        sums = [gradient.clone(memory_format=torch.contiguous_format) for gradient in gradients]
        for one in sums:
            all_reduce(one, ctx.axis).wait()
        return None, None, *sums


def fork(tensors: Sequence[Tensor], axis: Axis, enter: Enter) -> tuple[Tensor, ...]:
    """Returns tensors that all ranks have, for the branches: backward sums their gradients over the ranks.

    Backward calls `enter` first.
    """
    found: tuple[Tensor, ...] = _Fork.apply(axis, enter, *tensors)
    return found


@dataclass(frozen=True)
class Exchanger:
    """Carries out one exchange of a schedule. `forms` are tensors without memory that have the results' forms."""

    exchange: BranchExchange
    forms: Sequence[Tensor]
    axis: Axis
    device: torch.device

    def run(self, own: Sequence[Tensor], forks: Sequence[Tensor], enter: Enter) -> tuple[Tensor, ...]:
        """Returns all tensors of the exchange. `own` are this rank's, and `forks` those forked since the last one.

        On every rank the forks' backward must follow that of the exchange, also where no branch has used them.
        Backward calls `enter` first. All ranks take part in backward, also one that gives no result.
        """
        anchor = torch.zeros(
            (), device=self.device, requires_grad=torch.is_grad_enabled() and self.exchange.has_backward
        )
        found: tuple[Tensor, ...] = _ResultExchange.apply(self, enter, len(forks), anchor, *forks, *own)
        return found

    def gather(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns all tensors of the exchange, without a backward."""
        whole = torch.empty(self.axis.degree, self.exchange.part_bytes, dtype=torch.uint8, device=self.device)
        part = whole[self.axis.index]
        for one, tensor in zip(self.own, own, strict=True):
            put(part, one, tensor)
        all_gather(whole.view(-1), part, self.axis).wait()
        pairs = zip(self.exchange.tensors, self.forms, strict=True)
        return [take(whole[one.rank], one, form, self.device) for one, form in pairs]

    @property
    def own(self) -> list[SentTensor]:
        """The tensors of the exchange that this rank gives."""
        return [one for one in self.exchange.tensors if one.rank == self.axis.index]

    def own_of(self, values: Sequence[Any]) -> list[Any]:
        """Returns those of this rank, of a value for each tensor of the exchange."""
        return [value for one, value in zip(self.exchange.tensors, values, strict=True) if one.rank == self.axis.index]

    def receive(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that this rank gets of the exchange, without a backward."""
        return self.gather(own)

    def give_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's own results, of those of all tensors that it got."""
        return self.own_of(gradients)


def put(part: Tensor, one: SentTensor, tensor: Tensor) -> None:
    """Write a tensor to its place in a part of an exchange."""
    if one.num_bytes:
        _bytes_in(part, one).copy_(tensor.detach().contiguous().view(-1).view(torch.uint8))


def take(part: Tensor, one: SentTensor, form: Tensor, device: torch.device) -> Tensor:
    """Returns a tensor of a part of an exchange, with the form of a fake tensor."""
    made = torch.empty_strided(form.shape, form.stride(), dtype=form.dtype, device=device)
    if one.num_bytes:
        made.copy_(_bytes_in(part, one).view(form.dtype).view(form.shape))
    return made


def _bytes_in(part: Tensor, one: SentTensor) -> Tensor:
    return part[one.offset : one.offset + one.num_bytes]


class _ResultExchange(Function):
    """An exchange. It saves a tensor without elements: if its block is recomputed, then on all ranks at the same
    place of backward (here, or in what all ranks run behind the exchange), and up to the last exchange at least. So
    all ranks repeat the same collectives in the same order, also those that have saved nothing else.
    """

    @staticmethod
    def forward(
        ctx: Any, exchanger: Exchanger, enter: Enter, num_forks: int, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.exchanger, ctx.enter, ctx.num_forks = exchanger, enter, num_forks
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(anchor.new_empty(0))
        found = exchanger.receive(tensors[num_forks:])
        pairs = zip(exchanger.forms, found, strict=True)
        ctx.mark_non_differentiable(*(tensor for form, tensor in pairs if not form.requires_grad))
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.enter is not None:
            ctx.enter()
        _ = ctx.saved_tensors
        return None, None, None, None, *[None] * ctx.num_forks, *ctx.exchanger.give_back(gradients)
