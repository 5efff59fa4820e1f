"""Computes the loss in the model's head, so that the whole logits are never in memory (`models/loss.py`).

The model's code is not changed: the forward of its last linear returns the loss while labels are set, and logits
otherwise. That requires a model that returns the linear's result unchanged. weft's own models do. Another model is run
once on fake tensors (shapes only) with example tokens, while every operation on that result is watched. If there is an
unexpected one, the loss is computed from whole logits.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import find_blocks
from weft.inspection.chain_ends import HARMLESS
from weft.inspection.functional_call import run_on_fakes
from weft.models.decoder import Decoder
from weft.models.gpt2 import GPT2
from weft.models.loss import RowsLoss, head_loss, rows_loss
from weft.models.recurrent import RecurrentModel
from weft.plan import Plan


class LossHead:
    """Replaces the forward of the last linear. While `labels` is set it returns the loss, otherwise logits."""

    def __init__(self, module: nn.Linear) -> None:
        self.module, self.inner = module, module.forward
        self.labels: Tensor | None = None
        self.z_loss = 0.0
        self.rows: RowsLoss = rows_loss
        self.fake_rows: RowsLoss = rows_loss  # used for fake tensors

    def forward(self, input: Tensor) -> Tensor:  # the argument has nn.Linear's name, as callers may use it
        """Returns logits or, while labels are set, the summed loss."""
        if self.labels is None:
            return self.inner(input)
        if input.shape[:-1] != self.labels.shape:
            raise PlanError(
                f"the model's last linear is given {list(input.shape[:-1])} positions, and there are labels for "
                f"{list(self.labels.shape)}; give a label for each position (-100 where none counts)"
            )
        rows = self.fake_rows if isinstance(input, FakeTensor) else self.rows
        return head_loss(input, self.module.weight, self.module.bias, self.labels, self.z_loss, rows)

    @contextmanager
    def computing_loss(self, labels: Tensor, z_loss: float = 0.0) -> Iterator[None]:
        """In this context the head returns the loss of these labels."""
        self.labels, self.z_loss = labels, z_loss
        try:
            yield
        finally:
            self.labels, self.z_loss = None, 0.0


_LOSS_HEAD = Annotation[LossHead]("loss_head")


def loss_head_of(model: nn.Module) -> LossHead | None:
    """Returns the loss head of a model; None if its loss is computed from logits."""
    return _LOSS_HEAD.get(model)


def is_loss_in_head(plan: Plan) -> bool:
    """Does the head compute the loss under a plan? If x or y splits the logits, they have a loss of their own
    (`parallel/tensor/vocabulary.py`). Branches follow a trace of the model's own forward.
    """
    return plan.tensor.x * plan.tensor.y * plan.branch.degree == 1


def install_loss_head(model: nn.Module) -> None:
    """Let a model's head compute the loss, if the model returns the head's result unchanged."""
    module = _find_head(model) if loss_head_of(model) is None else None
    if module is not None:
        head = LossHead(module)
        _LOSS_HEAD.set(model, head)
        setattr(module, "forward", head.forward)  # noqa: B010 (a method to mypy)


def is_loss_head(module: nn.Module) -> bool:
    """Returns whether a module is a head with a `LossHead`."""
    return isinstance(getattr(module.__dict__.get("forward"), "__self__", None), LossHead)


def returns_loss(module: nn.Module) -> bool:
    """Returns whether a module is a head that returns the loss at the moment."""
    return is_loss_head(module) and module.__dict__["forward"].__self__.labels is not None


@contextmanager
def example_labels(model: nn.Module, finish: Any) -> Iterator[None]:
    """Set the labels of a model's loss head, if it has one, while an example with the loss `finish` runs."""
    head, labels = loss_head_of(model), getattr(finish, "labels", None)
    if head is None or labels is None:
        yield
    else:
        with head.computing_loss(labels()):
            yield


def logits_of(output: Any) -> Tensor:
    """Returns the logits of an output: the output itself, its `logits` (a key or attribute), or its first element."""
    if isinstance(output, Tensor):
        return output
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    return found if isinstance(found, Tensor) else logits_of(output[0])


def _find_head(model: nn.Module) -> nn.Linear | None:
    """Returns the last linear outside of blocks if the model returns its result and does nothing else with it."""
    blocks = tuple(f"{name}." for name in find_blocks(model))
    outside = [(name, module) for name, module in model.named_modules() if not f"{name}.".startswith(blocks)]
    linears = [module for _, module in outside if type(module) is nn.Linear]
    if not blocks or not linears or not any(isinstance(module, nn.Embedding) for _, module in outside):
        return None
    head = linears[-1]
    has_hooks = bool(model._forward_hooks or head._forward_hooks)
    if type(model) in (Decoder, GPT2, RecurrentModel) and "forward" not in model.__dict__ and not has_hooks:
        return head  # weft's own models return the result of their last linear
    watch = _ResultWatch()
    handle = head.register_forward_hook(watch.take, prepend=True)  # first, because other hooks may use the result
    try:
        output = run_on_fakes(model, watch, training=True)
        is_returned = watch.num_calls == 1 and not watch.is_used and logits_of(output) is watch.result
    except Exception:  # anything that the user's code may raise
        return None
    finally:
        handle.remove()
    return head if is_returned else None


class _ResultWatch(TorchDispatchMode):
    """Records whether any operation uses a module's result."""

    def __init__(self) -> None:
        super().__init__()
        self.result: Any = None
        self.num_calls, self.is_used = 0, False

    def take(self, _: nn.Module, __: Any, result: Any) -> None:
        """A forward hook that stores the module's result."""
        self.result, self.num_calls = result, self.num_calls + 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.result is not None and func not in HARMLESS and func.namespace != "prim":
            self.is_used |= any(leaf is self.result for leaf in tree_leaves((args, kwargs)))
        return func(*args, **(kwargs or {}))
