"""Splits the residual stream along the sequence over x before the first block, and gathers it after the last.

Along the chain of blocks each rank of x has its part of every sequence. If the embedding feeds the first block directly
(`inspection/chain_ends.py`), its partial sums are reduce-scattered; otherwise each rank takes its part of the whole
hidden states. After the last block the parts are gathered, unless they reach the head directly or through a norm: then
the head gathers them.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from weft.comm import Axis
from weft.errors import PlanError
from weft.inspection.chain_ends import ChainEnds, hidden_states_of, with_hidden_states
from weft.inspection.rng import PART, WHOLE, ScopedRng
from weft.parallel.tensor.operations import gather, scatter, scatter_sum
from weft.parallel.tensor.overlapped_matmul import SEQUENCE_DIM, StreamSplit


class SequenceSplitter:
    """Hooks on the first and the last block, and the norm after it, that split and gather the sequence."""

    def __init__(self, axis: Axis, ends: ChainEnds, stream: StreamSplit | None, rng: ScopedRng | None) -> None:
        self.axis, self.ends, self.stream, self.rng = axis, ends, stream, rng
        self.expected: Tensor | None = None  # a split result of one module, which the next one must get as its input
        self._passed: set[str] = set()  # the ends ("first", "last") that this forward has reached

    def attach(self, model: nn.Module, first: str, last: str) -> None:
        """Register the hooks. `first` and `last` are the names of the first and the last block."""
        # Before all other hooks: a block may itself be a module that gathers the sequence.
        model.get_submodule(first).register_forward_pre_hook(self._before_first, with_kwargs=True, prepend=True)
        model.get_submodule(last).register_forward_hook(self._after_last)
        model.register_forward_hook(self._after_model)
        if self.ends.norm is not None:
            model.get_submodule(self.ends.norm).register_forward_hook(self._after_norm, with_kwargs=True)

    def reset(self) -> None:
        """Start a new forward."""
        self.expected = None
        self._passed.clear()

    def check_input(self, value: Tensor, taker: str) -> None:
        """Check that the input of `taker` is the split result of the module before it.

        Raises PlanError if not: the model then computes something else than when weft inspected it.
        """
        given, self.expected = self.expected, None
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
        self.check_input(hidden, "the first block")
        return with_hidden_states(args, kwargs, scatter_sum(hidden, self.axis, SEQUENCE_DIM))

    def _after_last(self, _: nn.Module, __: Any, out: Any) -> Any:
        self._pass("last")
        if "first" not in self._passed:
            raise PlanError(_one_end("last", "first"))
        if self.rng is not None:
            self.rng.enter(WHOLE)
        hidden = out[0] if isinstance(out, tuple) else out
        if self.ends.head is not None:
            self.expected = hidden
            return out
        hidden = gather(hidden, self.axis, SEQUENCE_DIM)
        return (hidden, *out[1:]) if isinstance(out, tuple) else hidden

    def _after_norm(self, _: nn.Module, args: Any, kwargs: Any, out: Tensor) -> None:
        self.check_input((*args, *kwargs.values())[0], f"'{self.ends.norm}'")
        self.expected = out

    def _after_model(self, *_: Any) -> None:
        if self._passed == {"first"}:
            raise PlanError(_one_end("first", "last"))

    def _pass(self, end: str) -> None:
        if end in self._passed:
            raise PlanError(
                f"the {end} block was called twice in one forward, but tensor.sequence = true splits the sequence "
                f"where the chain of blocks begins and gathers it where it ends; use tensor.sequence = false"
            )
        self._passed.add(end)


def _one_end(called: str, skipped: str) -> str:
    return (
        f"a forward called the {called} block and not the {skipped} one, but tensor.sequence = true splits the "
        f"sequence before the first and gathers it after the last; call both, also in evaluation, or use "
        f"tensor.sequence = false"
    )


def _is_same(value: Tensor, other: Tensor) -> bool:
    """Are two tensors the same view of the same memory?"""
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.shape, t.stride()) for t in (value, other)]
    return places[0] == places[1]
