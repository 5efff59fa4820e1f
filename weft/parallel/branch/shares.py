"""The communication of branches whose ranks have different samples, with its backward.

gather     forward: all-gather of the samples of all ranks    backward: reduce-scatter of the gradients
exchange   forward: all-to-all, each rank gets its samples    backward: all-to-all, each owner gets the gradients
           of all results                                              of its results for all samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from weft.comm import Axis, all_gather, all_to_all, reduce_scatter
from weft.parallel.branch.exchange import Enter, Exchanger, put, take
from weft.parallel.branch.schedule import SentTensor


def gather_samples(tensor: Tensor, dim: int, axis: Axis) -> Tensor:
    """Returns the samples of all ranks, which lie along `dim`, without a backward."""
    part = tensor.detach().movedim(dim, 0).contiguous()
    whole = part.new_empty(axis.degree * part.shape[0], *part.shape[1:])
    all_gather(whole.view(-1).view(torch.uint8), part.view(-1).view(torch.uint8), axis).wait()
    return whole.movedim(0, dim).contiguous()


class _SampleGather(Function):
    @staticmethod
    def forward(ctx: Any, axis: Axis, enter: Enter, dim: int, tensor: Tensor) -> Tensor:
        ctx.axis, ctx.enter, ctx.dim = axis, enter, dim
        return gather_samples(tensor, dim, axis)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.enter is not None:
            ctx.enter()
        whole = gradient.movedim(ctx.dim, 0).contiguous()
        part = whole.new_empty(whole.shape[0] // ctx.axis.degree, *whole.shape[1:])
        reduce_scatter(part.view(-1), whole.view(-1), ctx.axis).wait()
        return None, None, None, part.movedim(0, ctx.dim)


def gather_fork(tensor: Tensor, dim: int, axis: Axis, enter: Enter) -> Tensor:
    """Returns the samples of all ranks for the branches. Backward calls `enter`, and sums the gradients over ranks."""
    if not (tensor.requires_grad and torch.is_grad_enabled()):
        return gather_samples(tensor, dim, axis)
    found: Tensor = _SampleGather.apply(axis, enter, dim, tensor)
    return found


@dataclass(frozen=True)
class ShareExchanger(Exchanger):
    """Carries out one exchange: each rank gives the results of its branches for all samples, and gets its own samples
    of all results. `dims` are those of samples, by number. `forms` have a rank's samples.
    """

    dims: Mapping[int, int]

    def receive(self, own: Sequence[Tensor]) -> list[Tensor]:
        return self.send_shares(own)

    def give_back(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        return self.return_gradients(gradients)

    def send_shares(self, own: Sequence[Tensor]) -> list[Tensor]:
        """Returns this rank's samples of all results."""
        sent = self._parts()
        for one, tensor in zip(self.own, own, strict=True):
            dim = self.dims[one.number]
            for part, share in zip(sent, tensor.detach().chunk(self.axis.degree, dim), strict=True):
                put(part, one, share)
        received = self._swap(sent)
        pairs = zip(self.exchange.tensors, self.forms, strict=True)
        return [take(received[one.rank], one, form, self.device) for one, form in pairs]

    def return_gradients(self, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Returns the gradients of this rank's own results for all samples, of those of each rank's samples."""
        sent = self._parts().zero_()
        for one, gradient in zip(self.exchange.tensors, gradients, strict=True):
            if gradient is not None:
                put(sent[one.rank], one, gradient)
        received = self._swap(sent)
        return [
            self._joined(received, one, form) if form.requires_grad else None
            for one, form in zip(self.exchange.tensors, self.forms, strict=True)
            if one.rank == self.axis.index
        ]

    def _joined(self, received: Tensor, one: SentTensor, form: Tensor) -> Tensor:
        return torch.cat([take(part, one, form, self.device) for part in received], self.dims[one.number])

    def _parts(self) -> Tensor:
        return torch.empty(self.axis.degree, self.exchange.part_bytes, dtype=torch.uint8, device=self.device)

    def _swap(self, sent: Tensor) -> Tensor:
        received = torch.empty_like(sent)
        all_to_all(received, sent, self.axis).wait()
        return received
