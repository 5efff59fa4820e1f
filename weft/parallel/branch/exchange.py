"""The communication of branches, with its backward: fork a tensor, and exchange results.

If all ranks have the same samples:

    fork       forward: nothing                      backward: all-reduce of the gradients
    exchange   forward: all-gather of all results    backward: nothing; each rank goes on with the gradients of its own

If ranks have different samples:

    fork       forward: all-gather of the samples    backward: reduce-scatter of the gradients
    exchange   forward: all-to-all; each rank gets   backward: all-to-all; each rank gets the gradients of its own
               its samples of all results                      results for all samples

Every rank gives a part of the same size to an exchange, which has its results one after another, as bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_reduce, all_to_all
from weft.inspection.first_order import Transposable
from weft.parallel.branch.schedule import BranchExchange, SentTensor
from weft.parallel.tensor.operations import own_part_of_sum

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

    def receive(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns the tensors that this rank gets of the exchange, without a backward: here, all of them."""
        whole = self._parts()
        part = whole[self.axis.index]
        for (one, _), tensor in zip(self.own, own, strict=True):
            put(part, one, tensor)
        all_gather(whole.view(-1), part, self.axis).wait()
        return self._taken(whole)

    def give_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's own results, from those of all tensors that it got."""
        pairs = zip(self.exchange.tensors, gradients, strict=True)
        return [gradient for one, gradient in pairs if one.rank == self.axis.index]

    @property
    def own(self) -> list[tuple[SentTensor, Tensor]]:
        """The tensors of the exchange that this rank gives, with their forms."""
        pairs = zip(self.exchange.tensors, self.forms, strict=True)
        return [(one, form) for one, form in pairs if one.rank == self.axis.index]

    def _parts(self) -> Tensor:
        """Returns memory for the parts of all ranks [ranks, bytes]."""
        return torch.empty(self.axis.degree, self.exchange.part_bytes, dtype=torch.uint8, device=self.device)

    def _taken(self, parts: Tensor) -> list[Tensor]:
        """Returns all tensors of the exchange, from the parts of all ranks."""
        pairs = zip(self.exchange.tensors, self.forms, strict=True)
        return [take(parts[one.rank], one, form, self.device) for one, form in pairs]


@dataclass(frozen=True)
class ShareExchanger(Exchanger):
    """Carries out one exchange: each rank gives the results of its branches for all samples, and gets its own samples
    of all results. `dims` are those of samples, by number. `forms` have a rank's samples.
    """

    dims: Mapping[int, int]

    def receive(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's samples of all results."""
        sent = self._parts()
        for (one, _), tensor in zip(self.own, own, strict=True):
            for part, share in zip(sent, tensor.detach().chunk(self.axis.degree, self.dims[one.number]), strict=True):
                put(part, one, share)
        return self._taken(self._swap(sent))

    def give_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's own results for all samples, from those of each rank's samples."""
        sent = self._parts().zero_()
        for one, gradient in zip(self.exchange.tensors, gradients, strict=True):
            if gradient is not None:
                put(sent[one.rank], one, gradient)
        received = self._swap(sent)
        return [
            torch.cat([take(part, one, form, self.device) for part in received], self.dims[one.number])
            if form.requires_grad
            else None
            for one, form in self.own
        ]

    def _swap(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.axis).wait()
        return received


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


def gather_samples(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Returns the samples of all ranks, which lie along `dim`, without a backward."""
    part = tensor.detach().movedim(dim, 0).contiguous()
    whole = part.new_empty(axis.degree * part.shape[0], *part.shape[1:])
    all_gather(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8), axis).wait()
    return whole.movedim(0, dim).contiguous()


def _sum_samples(gradient: Tensor, dim: int, axis: Axis, enter: Enter) -> Tensor:
    if enter is not None:
        enter()
    return own_part_of_sum(gradient, axis, dim)


_FORK_SAMPLES = Transposable(lambda tensor, dim, axis, _: gather_samples(tensor, dim, axis), _sum_samples, "branch")


def gather_fork(tensor: Tensor, dim: int, axis: Axis, enter: Enter) -> Tensor:
    """Returns the samples of all ranks for the branches. Backward calls `enter`, and sums the gradients over ranks."""
    return _FORK_SAMPLES.apply(tensor, dim, axis, enter)
