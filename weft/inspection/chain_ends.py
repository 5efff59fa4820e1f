"""Does the embedding feed the first block directly, and the last block the head, with at most a norm between?

If only the first block uses the embedding's result, its partial sums can be reduce-scattered along the sequence. If the
last block's result reaches the head directly, or through a norm of each token, it can stay split along the sequence up
to the head. The model runs once on fake tensors (shapes only) with made-up tokens, and every operation on those values
is recorded. If any other operation uses a value, that end of the chain is left unchanged.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.inspection.functional_call import run_on_fakes
from weft.inspection.split_probe import is_token_wise

HARMLESS = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)


@dataclass(frozen=True)
class ChainEnds:
    """Names of the modules at the ends of the chain of blocks.

    `embedding`: only the first block uses its result. `head`: takes the last block's result, through `norm` if that is
    given. Each is None if other operations use the values between.
    """

    embedding: str | None = None
    norm: str | None = None
    head: str | None = None


def find_chain_ends(
    model: nn.Module, blocks: Sequence[str], embeddings: Iterable[str], norms: Iterable[str], head: str | None
) -> ChainEnds:
    """Returns the embedding, norm and head that join the chain of blocks directly; `norms` are candidates."""
    outer = [name for name in embeddings if not any(name.startswith(f"{block}.") for block in blocks)]
    if not outer or not blocks:
        return ChainEnds()
    recorder = _DataflowRecorder(blocks[0], blocks[-1])
    handles = recorder.hooks(model, outer, norms, head)
    try:  # in training, so that its own operations (dropout) are recorded
        recorder.mark_used(run_on_fakes(model, recorder, training=True))
    except Exception:  # anything that the user's code may raise
        return ChainEnds()
    finally:
        for handle in handles:
            handle.remove()
    return recorder.result(model, outer, head)


class _DataflowRecorder(TorchDispatchMode):
    """Records which module's output is the input of which other module, and which outputs are used elsewhere."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.producers: dict[int, str] = {}  # storage of an output -> the module that returned it
        self.inputs: dict[str, str] = {}  # module -> the producer of its input
        self.used: set[str] = set()  # producers whose output is also used elsewhere
        self._alive: list[Tensor] = []  # keeps storages alive: addresses of freed ones are used again

    def hooks(self, model: nn.Module, embeddings: Iterable[str], norms: Iterable[str], head: str | None) -> list[Any]:
        """Register hooks on the model's modules, and return the handles to remove them."""
        handles = []
        for name in (*{*embeddings, *norms}, self.last):
            handles.append(model.get_submodule(name).register_forward_hook(partial(self._record_output, name)))
        for name in {self.first, *norms, *([head] if head else [])}:
            hook = partial(self._record_input, name)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        return handles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS and func.namespace != "prim":
            self.mark_used((args, kwargs))
        return func(*args, **(kwargs or {}))

    def mark_used(self, values: Any) -> None:
        """Mark the producers of these values as used by an operation outside the expected modules."""
        self.used |= {producer for leaf in tree_leaves(values) if (producer := self._producer(leaf)) is not None}

    def result(self, model: nn.Module, embeddings: Sequence[str], head: str | None) -> ChainEnds:
        embedding, source = self._source(self.first), self._source(head)
        ends = ChainEnds(embedding if embedding in embeddings else None)
        if source == self.last:
            return replace(ends, head=head)
        if source is None or self._source(source) != self.last or not is_token_wise(model.get_submodule(source)):
            return ends
        return replace(ends, norm=source, head=head)

    def _source(self, consumer: str | None) -> str | None:
        producer = self.inputs.get(consumer or "")
        return None if producer in self.used else producer

    def _producer(self, value: Any) -> str | None:
        return self.producers.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None

    def _record_output(self, name: str, _: nn.Module, __: Any, out: Any) -> Any:
        value = out[0] if isinstance(out, tuple) else out
        if name in self.producers.values():  # called twice
            self.used.add(name)
        fresh = _like(value)
        self._alive.append(fresh)
        self.producers[fresh.untyped_storage()._cdata] = name
        return (fresh, *out[1:]) if isinstance(out, tuple) else fresh

    def _record_input(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Record the producer of the input. The module gets a new tensor, so operations inside it are not counted."""
        value = hidden_states_of(args, kwargs)
        producer = self._producer(value)
        if value is None or producer is None:
            return args, kwargs
        if name in self.inputs or producer in self.inputs.values():
            self.used.add(producer)
        self.inputs[name] = producer
        return with_hidden_states(args, kwargs, _like(value))


def hidden_states_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """Returns the hidden states among a module's arguments.

    They are the first positional argument or, if there is none, the first floating-point keyword argument.
    """
    if args:
        return args[0] if isinstance(args[0], Tensor) else None
    return next((value for value in kwargs.values() if _is_floating(value)), None)


def with_hidden_states(
    args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments with the hidden states replaced by `value`."""
    if args:
        return (value, *args[1:]), kwargs
    key = next(key for key, given in kwargs.items() if _is_floating(given))
    return args, {**kwargs, key: value}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
