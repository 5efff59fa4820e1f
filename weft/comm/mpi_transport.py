"""MPI as a transport for CPU tensors, through mpi4py (`pip install 'weft[mpi]'`).

    WEFT_TRANSPORT=mpi mpirun -n 4 weft train run.toml

Collectives and messages of `collectives.py` then go through the site's MPI instead of Gloo. torch.distributed gets a
process group written here; a group of ranks is a communicator of its own. All operations are MPI's nonblocking ones.
MPI has no sums of 16-bit floats: they are summed in fp32 and rounded once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import LaunchError

VARIABLE = "WEFT_TRANSPORT"
BACKEND = "mpi4py"  # the name for torch.distributed, whose own "mpi" must be compiled in
_TAG = 7
_TYPES = {
    torch.float32: "FLOAT",
    torch.float64: "DOUBLE",
    torch.int64: "INT64_T",
    torch.int32: "INT32_T",
    torch.int8: "INT8_T",
    torch.uint8: "UINT8_T",
    torch.bool: "C_BOOL",
}
_PROCESS_GROUP: Any = dist.ProcessGroup  # its stub does not describe groups that are written in Python
_NARROW = (torch.bfloat16, torch.float16)


def wants_mpi(environ: Mapping[str, str]) -> bool:
    """Does the environment ask for MPI? Raises LaunchError if it asks for something unknown."""
    given = environ.get(VARIABLE, "")
    if given not in ("", "gloo", "mpi"):
        raise LaunchError(f"{VARIABLE} = '{given}' is not a transport of CPU tensors; use mpi or gloo, or unset it")
    return given == "mpi"


@contextmanager
def transport(name: str) -> Iterator[None]:
    """Ask for a transport of CPU tensors ("gloo" or "mpi") in this process, and in those that it starts."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = name
    try:
        yield
    finally:
        del os.environ[VARIABLE]
        if before is not None:
            os.environ[VARIABLE] = before


def register_mpi() -> str:
    """Make MPI known to torch.distributed and return the name of the back-end."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise LaunchError(
            f"{VARIABLE} = 'mpi', but MPI cannot be used ({error}); pip install 'weft[mpi]' and an MPI library, or "
            f"unset {VARIABLE}"
        ) from error

    def make(options: Any, _: Any) -> MpiGroup:
        ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
        world = MPI.COMM_WORLD
        if options.group_size > world.size or ranks[options.group_rank] != world.rank:
            raise LaunchError(
                f"rank {ranks[options.group_rank]} of {options.group_size} is rank {world.rank} of {world.size} for "
                f"MPI; start all ranks with mpirun or srun, or unset {VARIABLE}"
            )
        group = world.Create_group(world.group.Incl(ranks))
        return MpiGroup(MPI, group, options.group_rank, options.group_size, options.group_id)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, make, extended_api=True, devices=["cpu"])
    return BACKEND


class MpiWork(dist.Work):
    """An operation that has started. `finish` runs once, when it is complete."""

    def __init__(self, request: Any, kept: tuple[Any, ...], finish: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self._request, self._kept, self._finish = request, kept, finish

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self._request is not None:
            self._request.Wait()
            self._finish()
            self._request, self._kept = None, ()
        return True

    def is_completed(self) -> bool:
        return self._request is None or bool(self._request.Test())


class MpiGroup(_PROCESS_GROUP):
    """The ranks of a communicator. The methods are those that torch.distributed calls, under its names."""

    def __init__(self, mpi: Any, communicator: Any, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._mpi, self._communicator, self._size, self._name = mpi, communicator, size, name

    @property
    def group_name(self) -> str:
        return str(self._name)

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def getBackendName(self) -> str:  # noqa: N802 (torch's name)
        return BACKEND

    def _memory(self, tensor: Tensor) -> Any:
        """Returns the memory of a contiguous tensor. Not through numpy, after which torch cannot resize its storage."""
        return self._mpi.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())

    def _raw(self, tensor: Tensor) -> Any:
        """Returns a tensor as bytes, to be moved."""
        return [self._memory(tensor), self._mpi.BYTE]

    def _buffer(self, tensor: Tensor) -> Any:
        """Returns a tensor as numbers, to be reduced."""
        return [self._memory(tensor), getattr(self._mpi, _TYPES[tensor.dtype])]

    def _reduction(self, opts: Any) -> Any:
        kinds = {"SUM": self._mpi.SUM, "MAX": self._mpi.MAX, "MIN": self._mpi.MIN}
        return next(kind for name, kind in kinds.items() if opts.reduceOp == getattr(dist.ReduceOp, name))

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> MpiWork:
        (tensor,) = tensors
        buffer = _summable(tensor)
        request = self._communicator.Iallreduce(self._mpi.IN_PLACE, self._buffer(buffer), op=self._reduction(opts))
        return MpiWork(request, (buffer,), lambda: _copy_back(tensor, buffer))

    def _allgather_base(self, whole: Tensor, part: Tensor, opts: Any = None) -> MpiWork:
        sent, received = part.detach().clone(), whole.contiguous()  # MPI forbids a part of the result as input
        request = self._communicator.Iallgather(self._raw(sent), self._raw(received))
        return MpiWork(request, (sent, received), lambda: _copy_back(whole, received))

    def _reduce_scatter_base(self, part: Tensor, whole: Tensor, opts: Any = None) -> MpiWork:
        sent, received = _summable(whole), _summable(part)
        if sent is whole:
            sent = whole.clone()  # `part` may be a slice of it
        request = self._communicator.Ireduce_scatter_block(
            self._buffer(sent), self._buffer(received), op=self._reduction(opts)
        )
        return MpiWork(request, (sent, received), lambda: _copy_back(part, received))

    def alltoall_base(
        self, received: Tensor, sent: Tensor, received_counts: list[int], sent_counts: list[int], opts: Any = None
    ) -> MpiWork:
        given, taken = sent.contiguous(), received.contiguous()
        row = given.element_size() * (given[0].numel() if given.dim() > 1 and len(given) else 1)
        counts = [
            [count * row for count in own] if own else [whole.numel() * whole.element_size() // self._size] * self._size
            for own, whole in ((sent_counts, given), (received_counts, taken))
        ]
        request = self._communicator.Ialltoallv(
            [self._memory(given), counts[0], self._mpi.BYTE], [self._memory(taken), counts[1], self._mpi.BYTE]
        )
        return MpiWork(request, (given, taken), lambda: _copy_back(received, taken))

    # The names that torch 2.13 calls.
    all_gather_single, reduce_scatter_single, all_to_all_single = _allgather_base, _reduce_scatter_base, alltoall_base

    def broadcast(self, tensors: list[Tensor], opts: Any) -> MpiWork:
        (tensor,) = tensors
        buffer = tensor.contiguous()
        request = self._communicator.Ibcast(self._raw(buffer), root=opts.rootRank)
        return MpiWork(request, (buffer,), lambda: _copy_back(tensor, buffer))

    def send(self, tensors: list[Tensor], peer: int, tag: int = 0) -> MpiWork:
        buffer = tensors[0].detach().contiguous()
        return MpiWork(self._communicator.Isend(self._raw(buffer), peer, _TAG), (buffer,))

    def recv(self, tensors: list[Tensor], peer: int, tag: int = 0) -> MpiWork:
        buffer = tensors[0].detach().contiguous()
        request = self._communicator.Irecv(self._raw(buffer), peer, _TAG)
        return MpiWork(request, (buffer,), lambda: _copy_back(tensors[0], buffer))

    def barrier(self, opts: Any = None) -> MpiWork:
        return MpiWork(self._communicator.Ibarrier(), ())


def _summable(tensor: Tensor) -> Tensor:
    """Returns the tensor as MPI can sum it: contiguous, and wider if it has 16 bits."""
    return tensor.detach().float() if tensor.dtype in _NARROW else tensor.detach().contiguous()


def _copy_back(tensor: Tensor, buffer: Tensor) -> None:
    if tensor.data_ptr() != buffer.data_ptr():
        tensor.detach().copy_(buffer)
