"""The residual stream split along the sequence over x: where it is parted, and where it is whole again.

Along the chain of blocks each rank of x has its part of every sequence. Before the first block partial sums of the
embedding are summed and parted at once, if nothing else stands there (`ends.py`), and else what is whole is parted.
Behind the last block the parts are gathered, unless they come to the head through nothing but a norm: it gathers them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.chain_ends import ChainEnds, hidden_states_of, with_hidden_states
from weft.inspection.rng import PART, WHOLE, ScopedRng
from weft.parallel.tensor.operations import gather, scatter, scatter_sum
from weft.parallel.tensor.overlapped_matmul import SEQUENCE_DIM, Stream


class Chain:
    """Hooks on the ends of a chain of blocks."""

    def __init__(self, axis: Axis, ends: ChainEnds, stream: Stream | None, rng: ScopedRng | None) -> None:
        self.axis, self.ends, self.stream, self.rng = axis, ends, stream, rng
        self.given: Tensor | None = None  # what an end has given, and the next module there has yet to take
        self._passed: set[str] = set()  # the ends that this forward has come by

    def attach(self, model: nn.Module, first: str, last: str) -> None:
        """Part the sequence before the first block, and gather it behind the last."""
        # First of all hooks: a block may itself be what takes the sequence into a region.
        model.get_submodule(first).register_forward_pre_hook(self._before_first, with_kwargs=True, prepend=True)
        model.get_submodule(last).register_forward_hook(self._after_last)
        if self.ends.norm is not None:
            model.get_submodule(self.ends.norm).register_forward_hook(self._after_norm)

    def reset(self) -> None:
        """A new forward begins."""
        self.given = None
        self._passed.clear()

    def take(self, value: Tensor, taker: str) -> None:
        """What was given at an end has come to its taker as it was, or the model takes another way than when tried."""
        given, self.given = self.given, None
        if given is None or not _is_same(value, given):
            raise PlanError(
                f"{taker} got {list(value.shape)}, which is not what the module before it gave (of the split sequence, "
                f"{None if given is None else list(given.shape)}), although it was when weft tried the model; call the "
                f"model with its tokens alone, or use tensor.sequence = false"
            )

    def _before_first(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        self._pass("first")
        assert self.stream is not None
        hidden, parts = hidden_states_of(args, kwargs), self.axis.degree * self.stream.chunks
        if hidden is None or hidden.dim() != 3 or hidden.shape[SEQUENCE_DIM] % parts:
            over = f"x = {self.axis.degree}" + (f" × chunks = {self.stream.chunks}" if self.stream.chunks > 1 else "")
            raise PlanError(
                f"tensor.sequence = true splits [batch, sequence, features] over {over}, but the first block got "
                f"{None if hidden is None else list(hidden.shape)}; use a sequence that {parts} divides, or "
                f"tensor.sequence = false"
            )
        if self.rng is not None:
            self.rng.enter(PART)
        if self.ends.embedding is None:
            return with_hidden_states(args, kwargs, scatter(hidden, self.axis, SEQUENCE_DIM))
        self.take(hidden, "the first block")
        return with_hidden_states(args, kwargs, scatter_sum(hidden, self.axis, SEQUENCE_DIM))

    def _after_last(self, _: nn.Module, __: Any, out: Any) -> Any:
        self._pass("last")
        if self.rng is not None:
            self.rng.enter(WHOLE)
        hidden = out[0] if isinstance(out, tuple) else out
        if self.ends.head is not None:
            self.given = hidden
            return out
        hidden = gather(hidden, self.axis, SEQUENCE_DIM)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    def _after_norm(self, _: nn.Module, args: Any, out: Tensor) -> None:
        self.take(args[0], f"'{self.ends.norm}'")
        self.given = out

    def _pass(self, end: str) -> None:
        if end in self._passed:
            raise PlanError(
                f"the {end} block was called twice in one forward, but tensor.sequence = true splits the sequence "
                f"where the chain of blocks begins and gathers it where it ends; use tensor.sequence = false"
            )
        self._passed.add(end)


def _is_same(value: Tensor, other: Tensor) -> bool:
    """Whether two tensors are one, but for a name."""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in (value, other)]
    return places[0] == places[1]
