"""Checks in a model's first forward that its split head makes the model's logits.

weft takes the last linear that a model registers for its head, and leaves its result split over x. A model may register
its layers in another order, or use that result in a way that needs all classes. The logits would then be wrong, so the
first training and the first evaluation are watched, and such a model is refused by name. They also tell which tensors
of the model's result are its logits, if it returns others too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from weft.errors import PlanError
from weft.inspection.logits_use import LogitsWatch
from weft.inspection.nested_tensors import tensors_in
from weft.models.loss_head import logits_of


class _RefusingWatch(LogitsWatch):
    """Raises a PlanError where the logits are used in a way that needs all classes."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def refuse(self, reason: str) -> None:
        raise _refusal(self._name, reason)


def _refusal(name: str, reason: str) -> PlanError:
    return PlanError(
        f"weft splits the result of '{name}', the last linear that the model registers, over x as its logits, and "
        f"{reason}; register the linear that makes the logits last and return its result as it is, or use tensor.x = 1"
    )


class HeadUse:
    """Watches what a model does with the result of its head, in its first forward in each mode (training or not).

    While `gather` is set, the model is not watched and gets what `gather` makes of its head's result.
    """

    def __init__(self, model: nn.Module, name: str) -> None:
        self._name = name
        self.gather: Callable[[Tensor], Tensor] | None = None
        self._seen: set[bool] = set()
        self._places: dict[bool, tuple[int, ...]] = {}  # of the logits among the tensors of the model's result
        self._watch: LogitsWatch | None = None
        self._was_called = self._is_training = False
        self._inside = ExitStack()
        model.register_forward_pre_hook(self._begin, prepend=True)
        model.register_forward_hook(self._end, prepend=True)
        model.register_forward_hook(self._close, always_call=True)
        model.get_submodule(name).register_forward_hook(self._after_head)

    def _begin(self, model: nn.Module, _: Any) -> None:
        is_compiled = torch.compiler.is_compiling() or any(m._compiled_call_impl is not None for m in model.modules())
        if model.training not in self._seen and not is_compiled and self.gather is None:
            self._is_training = model.training
            self._seen.add(model.training)
            self._watch, self._was_called = _RefusingWatch(self._name), False

    def _after_head(self, head: nn.Module, args: Any, result: Any) -> Any:
        if self.gather is not None:
            return self.gather(result)
        if self._watch is not None:
            self._was_called = True
            self._watch.take(head, args, result)
            self._inside.enter_context(self._watch)
        return result

    def _end(self, _: nn.Module, __: Any, output: Any) -> None:
        watch = self._watch
        if watch is None:
            return
        if not self._was_called:
            raise _refusal(self._name, "the model does not call it")
        places = tuple(i for i, tensor in enumerate(tensors_in(output)) if watch.is_logits(tensor))
        if not places:
            raise _refusal(self._name, "the model does not return its result")
        self._places[self._is_training] = places

    def logits_in(self, model: nn.Module, output: Any) -> list[Tensor]:
        """Returns the logits in a model's output; of a model that was not watched, those that `logits_of` finds."""
        places = self._places.get(model.training)
        if places is None:
            return [] if isinstance(output, Mapping) and "logits" not in output else [logits_of(output)]
        tensors = tensors_in(output)
        return [tensors[place] for place in places if place < len(tensors)]

    def _close(self, *_: Any) -> None:
        self._inside.close()
        self._watch = None
