"""Whether nothing stands between a chain of blocks and the embedding before it, or the head behind it but a norm.

Where the embedding's result goes into the first block and nowhere else, partial sums of it can be summed and parted
along the sequence at once. Where the last block's result goes to the head through nothing but a norm of each token, it
can stay parted up to the head. A model is asked by running it on fake tensors (shapes only) with made-up tokens, and
watching every operation on those values: one that is not foreseen and the end stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.inspection.functional_call import call_with
from weft.inspection.split_probe import is_token_wise

HARMLESS = (torch.ops.aten.alias.default, torch.ops.aten.detach.default)
NUM_TOKENS = 4


@dataclass(frozen=True)
class Ends:
    """The embedding that only the first block takes, the head that takes the last block's result, and a norm between.

    None where something else stands there.
    """

    embedding: str | None = None
    norm: str | None = None
    head: str | None = None


def find_ends(
    model: nn.Module, blocks: Sequence[str], embeddings: Iterable[str], norms: Iterable[str], head: str | None
) -> Ends:
    """What joins the chain without anything between; `norms` are candidates."""
    outer = [name for name in embeddings if not any(name.startswith(f"{block}.") for block in blocks)]
    if not outer or not blocks:
        return Ends()
    watch = _Watch(blocks[0], blocks[-1])
    modes = [(module, module.training) for module in model.modules()]
    handles = watch.hooks(model, outer, norms, head)
    try:
        for module, _ in modes:
            module.training = True  # what only training does would stand between as well
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            tensors = [*model.named_parameters(), *model.named_buffers()]
            state = {name: torch.empty(t.shape, dtype=t.dtype, device="cpu") for name, t in tensors}
            tokens = torch.zeros(1, NUM_TOKENS, dtype=torch.long, device="cpu")
            with watch:
                watch.finish(call_with(model, state, (tokens,)))
    except Exception:  # anything that the user's code may raise
        return Ends()
    finally:
        for handle in handles:
            handle.remove()
        for module, was_training in modes:
            module.training = was_training
    return watch.result(model, outer, head)


class _Watch(TorchDispatchMode):
    """Follows values from the modules that give them to those that take them."""

    def __init__(self, first: str, last: str) -> None:
        super().__init__()
        self.first, self.last = first, last
        self.givers: dict[int, str] = {}  # by the storage of what they gave
        self.takers: dict[str, str] = {}  # of what whom gave
        self.used: set[str] = set()  # givers whose value something else used, too
        self._alive: list[Tensor] = []  # a storage's address means something only while it lives

    def hooks(self, model: nn.Module, embeddings: Iterable[str], norms: Iterable[str], head: str | None) -> list[Any]:
        """Watch the model's modules; the handles, to be removed."""
        handles = []
        for name in {*embeddings, *norms}:
            handles.append(model.get_submodule(name).register_forward_hook(partial(self._give, name)))
        for name in {self.first, *norms, *([head] if head else [])}:
            hook = partial(self._take, name)
            handles.append(model.get_submodule(name).register_forward_pre_hook(hook, with_kwargs=True))
        handles.append(model.get_submodule(self.last).register_forward_hook(partial(self._give, self.last)))
        return handles

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in HARMLESS and func.namespace != "prim":
            self.finish((args, kwargs))
        return func(*args, **(kwargs or {}))

    def finish(self, values: Any) -> None:
        """Whatever is among these values is used by something unforeseen."""
        self.used |= {giver for leaf in tree_leaves(values) if (giver := self._giver(leaf)) is not None}

    def result(self, model: nn.Module, embeddings: Sequence[str], head: str | None) -> Ends:
        embedding, source = self._source(self.first), self._source(head)
        ends = Ends(embedding if embedding in embeddings else None)
        if source == self.last:
            return replace(ends, head=head)
        if source is None or self._source(source) != self.last or not is_token_wise(model.get_submodule(source)):
            return ends
        return replace(ends, norm=source, head=head)

    def _source(self, taker: str | None) -> str | None:
        giver = self.takers.get(taker or "")
        return None if giver in self.used else giver

    def _giver(self, value: Any) -> str | None:
        return self.givers.get(value.untyped_storage()._cdata) if isinstance(value, Tensor) else None

    def _give(self, name: str, _: nn.Module, __: Any, out: Any) -> Any:
        value = out[0] if isinstance(out, tuple) else out
        if name in self.givers.values():  # called twice
            self.used.add(name)
        fresh = _like(value)
        self._alive.append(fresh)
        self.givers[fresh.untyped_storage()._cdata] = name
        return (fresh, *out[1:]) if isinstance(out, tuple) else fresh

    def _take(self, name: str, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Hand on something else in the value's place, so that what happens inside is not seen as a use of it."""
        value = hidden_of(args, kwargs)
        giver = self._giver(value)
        if value is None or giver is None:
            return args, kwargs
        if name in self.takers or giver in self.takers.values():
            self.used.add(giver)
        self.takers[name] = giver
        return with_hidden(args, kwargs, _like(value))


def hidden_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    """The hidden states among a module's arguments: the first argument, or else the first floating-point keyword."""
    if args:
        return args[0] if isinstance(args[0], Tensor) else None
    return next((value for value in kwargs.values() if _is_floating(value)), None)


def with_hidden(args: tuple[Any, ...], kwargs: dict[str, Any], value: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with other hidden states."""
    if args:
        return (value, *args[1:]), kwargs
    key = next(key for key, given in kwargs.items() if _is_floating(given))
    return args, {**kwargs, key: value}


def _is_floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _like(value: Tensor) -> Tensor:
    return torch.empty(value.shape, dtype=value.dtype, device=value.device)
