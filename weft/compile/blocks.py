"""torch.compile for training: each block by itself, what lies around them, and the loss of some rows of logits.

Blocks that are alike use what was compiled of the first, so a model takes as long as one of its blocks; where they are
large and of many kinds, they are compiled in pieces (weft/compile/pieces.py), alike ones once. What was
compiled is kept in the user's cache folder and found again by the next run. Where compiling fails, the run goes on
uncompiled and says so once.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.compile.pieces import Pieces
from weft.compile.saved_bytes import in_pieces, layer_kinds
from weft.errors import ConfigError
from weft.inspection.blocks import find_blocks
from weft.models.loss import rows_kernel, rows_loss
from weft.models.loss_head import loss_head_of
from weft.pipeline.rank_model import rank_model
from weft.run_file import Run

Say = Callable[[str], None]

VARIANTS = 4  # of what is compiled of one block: training, evaluation, and a few shapes


def wants_compile(run: Run, device: torch.device) -> bool:
    """Whether a run compiles: as it says, or else on GPUs, but for tiles of images."""
    wanted = run.train.compile
    if wanted and run.plan.tile.degree > 1:
        raise ConfigError(
            f"train.compile = true, but with tile = {run.plan.tile.degree} each function of torch becomes one of "
            f"a tile, which torch.compile does not follow; use false"
        )
    if wanted is not None:
        return wanted
    return device.type == "cuda" and run.plan.tile.degree == 1


def compile_blocks(model: nn.Module, say: Say, backend: str = "inductor") -> None:
    """Compile a parallel model's blocks, and the loss in its head, when they are first used. Blocks with many different
    layers are compiled in pieces.
    """
    folder = cache_folder() / "inductor"
    with suppress(OSError):  # torch has a folder of its own, which does not outlive the machine
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    outcome = _Outcome(say)
    blocks = _blocks(model)
    limit = VARIANTS * len(layer_kinds(blocks))  # torch counts by functions, and alike blocks of any sizes have one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for_blocks = Pieces(backend) if in_pieces(blocks) else backend
    for part in rank_model(model).models:
        for block in find_blocks(part).values():
            setattr(block, "forward", _Compiled(block.forward, for_blocks, outcome))  # noqa: B010 (a method to mypy)
        head = loss_head_of(part)
        if head is not None:
            head.rows = rows_kernel(head.module.weight.device) or _Compiled(rows_loss, backend, outcome)
        elif part is model:  # the stem of a model of images works on its largest tensors
            for block in find_blocks(part).values():
                _leave_out_hooks(block)
            setattr(part, "forward", _Compiled(part.forward, backend, outcome))  # noqa: B010


def cache_folder() -> Path:
    """Where weft keeps what it need not find out again."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft"


class _Outcome:
    """Whether compiling has failed, for all that is compiled."""

    def __init__(self, say: Say) -> None:
        self.failed, self.say = False, say

    def fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            reason = " ".join(str(error).split("\n")[:2])
            self.say(f"torch.compile failed ({reason}); going on uncompiled")


class _Compiled:
    """A function that is compiled when it is called, until that fails."""

    def __init__(self, function: Callable[..., Any], backend: str | Pieces, outcome: _Outcome) -> None:
        self.function, self.backend, self.outcome = function, backend, outcome
        self.compiled = torch.compile(function, dynamic=False, backend=backend)

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # the model around it does not take it in
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.outcome.failed:
            return self.function(*args, **kwargs)
        try:
            return self.compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            self.outcome.fail(error)
            return self.function(*args, **kwargs)


def _leave_out_hooks(module: nn.Module) -> None:
    """Let what is compiled around a module stop before its hooks, which are no part of a graph."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = torch._dynamo.disable(hook)


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [block for part in rank_model(model).models for block in find_blocks(part).values()]
