"""Detects silent corruption: bits that differ where they must be equal, and the rank at fault.

There are two checks, each done every few steps. The first hashes the tensors of which several ranks hold copies (over
`data`, the whole buffers of `shard` stages 1 and 2, replicas of x × y, mirrored stages, tied parameters) and compares
the hashes. It finds wrong memory and wrong updates. The second computes a random micro-batch twice on the same rank and
compares the bits of its loss and gradients. It finds wrong arithmetic, whose gradients would be the same on all
replicas.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from weft.comm import all_gather, all_reduce
from weft.errors import CorruptionError
from weft.mesh import Mesh
from weft.models.router import keeping_routed
from weft.optim.stepper import stepper
from weft.parallel.model_state import all_flats, all_units
from weft.pipeline.rank_model import rank_model
from weft.pipeline.shared_parameters import running_statistics
from weft.resilience.bad_numbers import Guard
from weft.run_file import Run
from weft.step.train_step import Checks

Digests = Sequence[Sequence[tuple[int, int]]]  # for each rank: (hash of the tensor's name, hash of its bits)
_CHUNK_NUMEL = 1 << 22
_GOLDEN = -0x61C8864680B583EB  # the odd number nearest 2^64 / golden ratio, as an int64
_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_NAME_BYTES = 128
_REMEDY = "A chance event heals when all start again from a checkpoint; if it comes back, that device is broken"


def digest(tensor: Tensor) -> Tensor:
    """A 64-bit hash of a tensor's bits [], computed on its device: the sum of its words, each times an odd number that
    depends on the word's index, modulo 2^64. So one flipped bit always changes the hash.
    """
    words = tensor.detach().contiguous().view(-1).view(_WORDS[tensor.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, words.numel(), _CHUNK_NUMEL):
        part = words[start : start + _CHUNK_NUMEL].to(torch.int64)
        place = torch.arange(start + 1, start + 1 + part.numel(), device=tensor.device) * _GOLDEN
        total += (part * ((place ^ (place >> 29)) | 1)).sum()
    return total


def digest_all(tensors: Sequence[Tensor]) -> Tensor:
    """A 64-bit hash of several tensors, which depends on their order []."""
    total = torch.zeros((), dtype=torch.int64, device=tensors[0].device if tensors else None)
    for index, tensor in enumerate(tensors):
        total += (digest(tensor) * (2 * index + 1)).to(total.device)
    return total


def checks_of(run: Run, step: int, guard: Guard, model: nn.Module, optimizer: Optimizer, mesh: Mesh) -> Checks:
    """The checks of step `step` (from 0): bad numbers always, replicas and a repeated micro-batch if they are due.

    Replicas are also compared before a checkpoint, so that no corrupted state is saved.
    """
    config, number = run.numbers, step + 1
    checks = Checks(guard.judge)
    every = [config.compare_every, run.checkpoint.every, run.checkpoint.memory_every]
    is_due = number == run.train.steps or any(each is not None and number % each == 0 for each in every)
    if config.compare_every is not None and is_due:
        checks = replace(checks, before_update=partial(compare_replicas, model, optimizer, mesh, number))
    if config.repeat_every is not None and number % config.repeat_every == 0:
        repeated = RepeatedMicroBatch(model, mesh, number, run.split.accumulation, run.train.seed)
        checks = replace(checks, micro_batch=repeated)
    return checks


# --- replicas


def compare_replicas(model: nn.Module, optimizer: Optimizer, mesh: Mesh, step: int) -> None:
    """Compare the tensors of which several ranks hold copies, and raise CorruptionError if they differ.

    Every rank calls this between a step's backward and its update.
    """
    stepper(optimizer).synchronize()
    held = list(_replicated_tensors(model))
    names = {_name_hash(name): name.partition("|")[0] for name, _ in held}
    own = torch.zeros(len(held), 2, dtype=torch.int64)
    if held:
        own[:, 0] = torch.tensor([_name_hash(name) for name, _ in held])
        own[:, 1] = torch.stack([digest_all(tensors) for _, tensors in held]).cpu()
    for number, groups in find_differences(_gather(own, mesh)).items():
        what = _share_name(names.get(number, ""), mesh)
        raise CorruptionError(f"silent corruption in step {step}: {describe(groups, what)}. {_REMEDY}")


def _replicated_tensors(model: nn.Module) -> Iterator[tuple[str, list[Tensor]]]:
    """The tensors that this rank keeps between steps. Ranks that hold copies of a tensor give it the same name."""
    for units, names in rank_model(model).named_units():
        for flat in units.flats:
            named = [(names.get(one.name, one.name), one.cut and one.cut.intervals) for one in flat.layout.parameters]
            first = f"{named[0][0]}{' and others' if len(named) > 1 else ''}|{named}"
            if not flat.frees_whole:
                yield first, [parameter.detach() for parameter in flat.whole_parameters]
            if flat.is_apart:
                yield f"{first}|{flat.shard.index}", [piece.detach() for piece in flat.pieces if piece.numel()]


def _name_hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _gather(own: Tensor, mesh: Mesh) -> Digests:
    """Gather the rows of all ranks, which may have different numbers of rows."""
    most = torch.tensor([len(own)])
    all_reduce(most, mesh["world"], "max").wait()
    padded = torch.zeros(int(most), 2, dtype=torch.int64)
    padded[: len(own)] = own
    whole = torch.empty(mesh["world"].degree, *padded.shape, dtype=torch.int64)
    all_gather(whole.view(-1), padded.view(-1), mesh["world"]).wait()
    return [[(int(key), int(value)) for key, value in rows if key] for rows in whole.tolist()]


def find_differences(digests: Digests) -> dict[int, list[list[int]]]:
    """Returns, for each name whose hashes differ, the groups of ranks that agree with each other, the largest first."""
    holders: dict[int, dict[int, list[int]]] = {}
    for rank, rows in enumerate(digests):
        for key, value in rows:
            holders.setdefault(key, {}).setdefault(value, []).append(rank)
    return {
        key: sorted(values.values(), key=lambda ranks: (-len(ranks), ranks))
        for key, values in holders.items()
        if len(values) > 1
    }


def describe(groups: Sequence[Sequence[int]], what: str) -> str:
    """Describe which ranks are at fault if more than half agree; else which ranks differ."""
    most, *others = groups
    rest = sorted(rank for group in others for rank in group)
    if len(most) > len(rest):
        others_of_it = [rank for rank in most if rank not in rest] or most  # a rank may hold several copies itself
        return f"{_hold(rest)} of the parameters '{what}' other bits than {_names(others_of_it)}"
    return (
        f"{_hold([*most, *rest])} different bits of the parameters '{what}', and there is no majority to tell "
        f"which is at fault"
    )


def _names(ranks: Sequence[int]) -> str:
    ranks = sorted(set(ranks))
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _hold(ranks: Sequence[int]) -> str:
    return _names(ranks) + (" holds" if len(set(ranks)) == 1 else " hold")


def _share_name(name: str, mesh: Mesh) -> str:
    """Returns the name of the first rank that has one, on all ranks."""
    text = name.encode()[:_NAME_BYTES]
    own = torch.zeros(_NAME_BYTES, dtype=torch.uint8)
    own[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    whole = torch.empty(mesh["world"].degree, _NAME_BYTES, dtype=torch.uint8)
    all_gather(whole.view(-1), own, mesh["world"]).wait()
    names = [bytes(row).rstrip(b"\0").decode(errors="replace") for row in whole.tolist()]
    return next(given for given in names if given)


# --- a repeated micro-batch


class RepeatedMicroBatch:
    """Computes one micro-batch of a step twice and compares the bits of the results. Used as `Checks.micro_batch`."""

    def __init__(self, model: nn.Module, mesh: Mesh, step: int, num_micro_batches: int, seed: int) -> None:
        self._model, self._mesh, self._step = model, mesh, step
        self._chosen = random.Random(f"{seed}:{step}").randrange(num_micro_batches)  # the same on all ranks

    def __call__(self, index: int, compute: Callable[[], Tensor]) -> Tensor:
        """Returns the loss of a micro-batch. `compute` runs its forward and backward."""
        if index != self._chosen:
            return compute()
        statistics = running_statistics(self._model)
        before = [tensor.clone() for tensor in statistics]
        loss, first = self._hashed(compute)
        after = [tensor.clone() for tensor in statistics]
        for tensor, old in zip(statistics, before, strict=True):
            tensor.copy_(old)
        with _keep_gradients(self._model), keeping_routed(self._model):
            again, second = self._hashed(compute)
        for tensor, new in zip(statistics, after, strict=True):
            tensor.copy_(new)
        self._compare(bool(((first != second).any() | (digest(loss) != digest(again))).item()), index)
        return loss

    def _hashed(self, compute: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
        """Returns the loss and a hash of each parameter's gradient, as backward computes it."""
        parameters = _trained_parameters(self._model)
        hashes = torch.zeros(len(parameters), dtype=torch.int64, device=self._mesh.device)

        def add(place: int, gradient: Tensor) -> None:
            hashes[place] += digest(gradient)

        handles = [
            parameter.register_hook(lambda gradient, place=place: add(place, gradient))
            for place, parameter in enumerate(parameters)
        ]
        try:
            return compute(), hashes
        finally:
            for handle in handles:
                handle.remove()

    def _compare(self, differs: bool, index: int) -> None:
        flags = torch.zeros(self._mesh["world"].degree, dtype=torch.int32)
        flags[self._mesh["world"].index] = differs
        all_reduce(flags, self._mesh["world"], "max").wait()
        ranks = flags.nonzero().flatten().tolist()
        if ranks:
            raise CorruptionError(
                f"silent corruption in step {self._step}: {_names(ranks)} computed micro-batch {index} twice, and "
                f"loss or gradients have different bits. {_REMEDY}"
            )


def _trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """The trained parameters that forward uses."""
    if not all_units(model):
        return [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [parameter for flat in all_flats(model) if flat.trainable for parameter in flat.whole_parameters]


@contextmanager
def _keep_gradients(model: nn.Module) -> Iterator[None]:
    """In this context backward computes gradients for hooks only; accumulated gradients stay unchanged."""
    parameters = _trained_parameters(model)
    gradients = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    for units in all_units(model):
        units.rehearses = True
    try:
        yield
    finally:
        for units in all_units(model):
            units.rehearses = False
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
