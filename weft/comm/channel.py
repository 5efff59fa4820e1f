"""A channel: messages between two processes of a job over Gloo, outside of the mesh.

Training ranks and ranks with another role (loader, validator) are in different worlds and share the job's store only.
Each pair has its own connection, so a process that is lost is an error of its channels, and of nothing else. Sends
enter the ledger under the name of the role.
"""

from __future__ import annotations

import re
from datetime import timedelta

import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # as documented

from weft.comm.ledger import Ledger
from weft.errors import LostRankError

LONG = timedelta(days=30)  # of a wait that ends with a message, or with the other process


class PairChannel:
    """One end of a channel. `axis` is its name in the ledger, and `peer` names the other process in errors."""

    def __init__(
        self, store: Store, key: str, index: int, axis: str, peer: str, ledger: Ledger, timeout: timedelta
    ) -> None:
        """Connects both ends: they give the same `key`, new for each connection, and index 0 or 1. Raises
        LostRankError if the other does not come within `timeout`.
        """
        self.axis, self.peer, self._ledger, self._other = axis, peer, ledger, 1 - index
        try:
            self._group = dist.ProcessGroupGloo(PrefixStore(key, store), index, 2, timeout)
        except (RuntimeError, dist.DistError) as error:
            raise self._lost(error) from error

    def send(self, tensor: Tensor) -> PendingMessage:
        """Start to send a tensor of host memory, which must stay unchanged until the message's `wait` returns."""
        self._ledger.record(self.axis, "send", tensor.nbytes)
        try:
            return PendingMessage(self, self._group.send([tensor], self._other, 0))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._lost(error) from error

    def receive(self, tensor: Tensor) -> PendingMessage:
        """Start to receive the next message into a tensor of host memory."""
        try:
            return PendingMessage(self, self._group.recv([tensor], self._other, 0))  # type: ignore[attr-defined]
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: BaseException) -> LostRankError:
        """Returns the first sentence of the error, without the place in Gloo's source that it begins with."""
        reason = re.split(r"\. |\n", re.sub(r"^\[[^\]]*\] *", "", str(error)))[0]
        return LostRankError(f"lost the connection to {self.peer}: {reason}")


class PendingMessage:
    """A message on its way."""

    def __init__(self, channel: PairChannel, work: dist.Work) -> None:
        self.channel, self._work = channel, work

    def wait(self, timeout: timedelta = LONG) -> None:
        """Return when the tensor was sent or received. Raises LostRankError if the other process is gone, or does not
        answer within `timeout`.
        """
        try:
            self._work.wait(timeout)
        except RuntimeError as error:
            raise self.channel._lost(error) from error
