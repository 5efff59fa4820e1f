"""Can the logits stay split over x? Only if the model does nothing with them that needs all classes.

The model runs once on fake tensors (shapes only) with made-up tokens, and every operation on the head's result is
watched. Element-wise functions of the logits and numbers (Cohere scales them, Gemma 2 caps them) work on a part of the
classes as on all. A softmax, a bias that is added after the head, or a scale that is trained (each rank would have the
gradient of its classes alone) does not, and the logits are then gathered. A model that does not run on tokens alone (of
images) is taken to return its head's result, which its first forward checks (`parallel/tensor/split_logits.py`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.inspection.functional_call import run_on_fakes
from weft.inspection.nested_tensors import tensors_in

OWN_MODELS = "weft.models."  # these return their head's result
aten = torch.ops.aten
OF_EACH_ELEMENT = (
    *(aten.alias, aten.detach, aten.clone, aten._to_copy, aten.view, aten._unsafe_view, aten.unsqueeze, aten.slice),
    *(aten.select, aten.mul, aten.div, aten.neg, aten.tanh, aten.sigmoid, aten.add, aten.sub, aten.clamp),
)


class LogitsUse(NamedTuple):
    """Why a model needs logits of all classes, if it does; what is assumed of a model that could not be run."""

    reason: str | None = None
    assumption: str | None = None


def find_logits_use(model: nn.Module, head: nn.Module) -> LogitsUse:
    """Returns what the model does with its head's result that needs all classes, if anything."""
    has_tokens = any(isinstance(module, nn.Embedding) for module in model.modules())
    if type(model).__module__.startswith(OWN_MODELS) or not has_tokens:
        return LogitsUse()
    watch = LogitsWatch()
    handle = head.register_forward_hook(watch.take, prepend=True)
    try:  # not in training, which has layer drop, and so depends on random numbers
        result = run_on_fakes(model, watch, training=False, has_graph=True)
        if not any(watch.is_logits(tensor) for tensor in tensors_in(result)):
            return LogitsUse("the model does not return its head's result")
    except Exception as error:  # anything that the user's code may raise
        return LogitsUse(
            assumption=f"{type(model).__name__} does not run on tokens alone ({type(error).__name__}), so weft assumes "
            f"that it returns its head's result and keeps logits split over x; a proof fails if it does not"
        )
    finally:
        handle.remove()
    return LogitsUse(watch.found)


class LogitsWatch(TorchDispatchMode):
    """Follows what is computed from a module's result."""

    def __init__(self) -> None:
        super().__init__()
        self.found: str | None = None
        self.num_classes = self._num_elements = 0
        self._storages: dict[int, Tensor] = {}  # of logits; the tensors keep them alive

    def take(self, _: nn.Module, __: Any, result: Tensor) -> None:
        """A forward hook of the head."""
        self.num_classes, self._num_elements = result.shape[-1], result.numel()
        self._storages[result.untyped_storage()._cdata] = result

    def is_logits(self, tensor: Tensor) -> bool:
        """Is this the module's result, or an element-wise function of it?"""
        return tensor.untyped_storage()._cdata in self._storages

    def refuse(self, reason: str) -> None:
        """Records what needs all classes, if nothing was found before."""
        self.found = self.found or reason

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        if func.namespace == "prim" or not any(self.is_logits(tensor) for tensor in given):
            return func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        others = [tensor for tensor in given if not self.is_logits(tensor)]
        if any(tensor.dim() and tensor.shape[-1] != 1 for tensor in others):
            self.refuse(f"'{name}' joins its logits with a value of each class")
        if any(tensor.requires_grad for tensor in others):
            self.refuse(f"'{name}' joins its logits with a value that is trained, whose gradient is of all classes")
        result = func(*args, **(kwargs or {}))
        keeps_classes = isinstance(result, Tensor) and result.dim() > 0 and result.shape[-1] == self.num_classes
        if func._overloadpacket not in OF_EACH_ELEMENT or not keeps_classes:
            self.refuse(f"'{name}' of its logits needs all classes")
        elif result.numel() != self._num_elements:
            self.refuse(f"'{name}' leaves a part of its logits out")
        elif isinstance(result, Tensor):
            self._storages[result.untyped_storage()._cdata] = result
        return result
