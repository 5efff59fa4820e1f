"""Weft plans, proves, runs and serves networks too large for one device.

plan = weft.Plan(data=2, shard=weft.Shard(degree=4, stage=3))
weft.verify(model_fn, batch_fn, plan).require()   # equals the unsplit model, or says where it does not
model = weft.parallelize(model, plan)             # the same module, its state split as the plan says

A public name is imported when it is first used, so that commands which need no torch start without it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from weft.version import VERSION

if TYPE_CHECKING:
    from weft.errors import WeftError
    from weft.memory.prune import prune
    from weft.mesh import Mesh
    from weft.optim import AdamW
    from weft.parallel.apply import parallelize
    from weft.parallel.gradient_norm import clip_grad_norm
    from weft.parallel.model_state import sync_gradients
    from weft.parallel.tensor.vocabulary import cross_entropy, vocabulary_of
    from weft.parallel.tile import tile
    from weft.plan import Branch, Context, Memory, Pipe, Plan, Shard, Tensor, Tile, load_plan
    from weft.profiling import profile
    from weft.proof.prove import verify
    from weft.step.model_loss import model_loss
    from weft.step.objective import CROSS_ENTROPY, Objective
    from weft.step.train_step import evaluate, train_step

__version__ = VERSION

__all__ = [
    "CROSS_ENTROPY",
    "AdamW",
    "Branch",
    "Context",
    "Memory",
    "Mesh",
    "Objective",
    "Pipe",
    "Plan",
    "Shard",
    "Tensor",
    "Tile",
    "WeftError",
    "clip_grad_norm",
    "cross_entropy",
    "evaluate",
    "load_plan",
    "model_loss",
    "parallelize",
    "profile",
    "prune",
    "sync_gradients",
    "tile",
    "train_step",
    "verify",
    "vocabulary_of",
]

_MODULES = {
    "weft.errors": ("WeftError",),
    "weft.memory.prune": ("prune",),
    "weft.mesh": ("Mesh",),
    "weft.optim": ("AdamW",),
    "weft.parallel.apply": ("parallelize",),
    "weft.parallel.gradient_norm": ("clip_grad_norm",),
    "weft.parallel.model_state": ("sync_gradients",),
    "weft.parallel.tensor.vocabulary": ("cross_entropy", "vocabulary_of"),
    "weft.parallel.tile": ("tile",),
    "weft.plan": ("Branch", "Context", "Memory", "Pipe", "Plan", "Shard", "Tensor", "Tile", "load_plan"),
    "weft.profiling": ("profile",),
    "weft.proof.prove": ("verify",),
    "weft.step.model_loss": ("model_loss",),
    "weft.step.objective": ("CROSS_ENTROPY", "Objective"),
    "weft.step.train_step": ("evaluate", "train_step"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'weft' has no attribute '{name}'")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
