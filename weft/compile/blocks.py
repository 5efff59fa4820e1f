"""torch.compile for training: compiles each block, the code around blocks, and the loss of some rows of logits.

Equal blocks share the code compiled for the first, so a model compiles as fast as one of its blocks. Large blocks of
many kinds are compiled in pieces (`pieces.py`), and equal pieces once. Compiled code is stored in the user's cache
folder, where the next run finds it. If compiling fails, the run continues uncompiled and reports it once; what
torch.compile leaves out of a block for another reason than weft's own is reported once, too.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from weft.compile.pieces import PieceCompiler
from weft.compile.saved_bytes import layer_kinds, needs_pieces
from weft.errors import ConfigError
from weft.inspection.blocks import find_blocks
from weft.models.loss import rows_kernel, rows_loss
from weft.models.loss_head import loss_head_of
from weft.models.router import routers_of
from weft.pipeline.rank_model import rank_model
from weft.run_file import Run

Say = Callable[[str], None]

# In torch's reasons where weft itself keeps code out of graphs (torch._disable_dynamo), as collectives.
BY_WEFT = ("torch.compiler.disable", "torch/_compile")
VARIANTS = 4  # compiled versions of one block: training, evaluation, and a few shapes


def wants_compile(run: Run, device: torch.device) -> bool:
    """Does a run compile? `train.compile` decides; if it is not set, runs on GPUs do, unless images are split in tiles,
    batch norms take statistics over all ranks, branches lie on different ranks, K-FAC samples layers, or the model is
    recurrent.

    Raises ConfigError if `train.compile` is true with tiles, branches or a recurrent model.
    """
    wanted = run.train.compile
    if wanted and run.plan.tile.degree > 1:
        raise ConfigError(
            f"train.compile = true, but with tile = {run.plan.tile.degree} each function of torch becomes one of "
            f"a tile, which torch.compile does not follow; use false"
        )
    if wanted and not run.model.is_compiled:
        raise ConfigError(
            f"train.compile = true, but torch.compile would unroll architecture '{run.model.architecture}' token by "
            f"token, and torch has kernels for whole sequences; use false"
        )
    if wanted and run.plan.branch.degree > 1:
        raise ConfigError(
            f"train.compile = true, but with branch = {run.plan.branch.degree} each operation is run or skipped by "
            f"itself, which torch.compile does not follow; use false"
        )
    if wanted is not None:
        return wanted
    is_whole = not run.plan.is_viewed and run.plan.branch.degree == 1
    return device.type == "cuda" and is_whole and run.model.is_compiled and run.train.kfac is None


def compile_blocks(model: nn.Module, say: Say, backend: str = "inductor") -> None:
    """Replace the forwards of a parallel model's blocks, and the loss in its head, by compiled ones.

    They are compiled when they are first called. Blocks with many different layers are compiled in pieces. `say`
    receives a message if compiling fails, and one for each reason for which a part of the model stays uncompiled.
    """
    folder = cache_folder() / "inductor"
    with suppress(OSError):  # torch's default folder is a temporary one
        folder.mkdir(parents=True, exist_ok=True)
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder))
    # A router records its losses and counts in forward, and a recompute's records are forgotten: they need not be made.
    # Without this, torch.compile refuses a checkpoint around a router.
    torch._dynamo.config.skip_fwd_side_effects_in_bwd_under_checkpoint = bool(routers_of(model))
    status = _CompileStatus(say)
    blocks = [block for part in rank_model(model).models for block in find_blocks(part).values()]
    limit = VARIANTS * len(layer_kinds(blocks))  # torch counts per function, and equal classes share one
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, limit)
    for_blocks = PieceCompiler(backend) if needs_pieces(blocks) else backend
    for part in rank_model(model).models:
        for block in find_blocks(part).values():
            setattr(block, "forward", _CompiledFunction(block.forward, for_blocks, status))  # noqa: B010 (a method to mypy)
        head = loss_head_of(part)
        if head is not None:
            head.rows = rows_kernel(head.module.weight.device) or _CompiledFunction(rows_loss, backend, status)
        elif part is model:  # compile the code around blocks, too: an image model's stem has the largest tensors
            for block in find_blocks(part).values():
                _leave_out_hooks(block)
            setattr(part, "forward", _CompiledFunction(part.forward, backend, status))  # noqa: B010


def cache_folder() -> Path:
    """Returns the folder in which weft stores results for later runs."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "weft"


class _CompileStatus:
    """Whether compiling has failed, and what stays uncompiled. All compiled functions of a model share it."""

    def __init__(self, say: Say) -> None:
        self.failed, self.say = False, say
        self._known = set(_reasons())

    def fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            reason = " ".join(str(error).split("\n")[:2])
            self.say(f"torch.compile failed ({reason}); going on uncompiled")

    def report(self) -> None:
        """Say why parts of the model stay uncompiled, each reason once. Call this after each call of compiled code."""
        if len(self._known) == len(_reasons()):
            return
        for reason in set(_reasons()) - self._known:
            self._known.add(reason)
            if not any(one in reason for one in BY_WEFT):
                lines = [line.strip() for line in reason.split("\n") if line.strip()][:3]
                self.say(
                    f"torch.compile leaves a part of the model uncompiled ({'; '.join(lines)}): it is slower and may "
                    f"take more memory than predicted"
                )


class _CompiledFunction:
    """A function that is compiled at its first call. If compiling fails, it runs uncompiled."""

    def __init__(self, function: Callable[..., Any], backend: str | PieceCompiler, status: _CompileStatus) -> None:
        self.function, self.backend, self.status = function, backend, status
        self.compiled = torch.compile(function, dynamic=False, backend=backend)

    @torch._disable_dynamo(recursive=False)  # type: ignore[attr-defined]  # not inlined into the graph of the model around it
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.status.failed:
            return self.function(*args, **kwargs)
        try:
            result = self.compiled(*args, **kwargs)
            self.status.report()
            return result
        except torch._dynamo.exc.TorchDynamoException as error:
            self.status.fail(error)
            return self.function(*args, **kwargs)


def _leave_out_hooks(module: nn.Module) -> None:
    """Exclude a module's hooks from graphs of the compiled code around it."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks):
        for key, hook in hooks.items():
            hooks[key] = torch._dynamo.disable(hook)


def _reasons() -> Mapping[str, int]:
    """Returns torch.compile's reasons for leaving code out of graphs in this process, and how often each occurred."""
    found: Mapping[str, int] = torch._dynamo.utils.counters["graph_break"]
    return found
