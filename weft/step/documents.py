"""Documents that share a sequence and must not see each other (`data.documents = "separate"`).

Sequences are cut from documents laid end to end, so one sequence may hold several. From outside the model, each
attention is told before every forward which document each token belongs to; in a pipeline each stage is, and a block
that is computed again in backward has the documents of its own micro-batch. Over `context` the numbers of the whole
sequence are needed: tokens are all-gathered once for each micro-batch, 8 bytes a token.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm import Axis, Traffic
from weft.comm.ledger import Key
from weft.data.config import DataConfig
from weft.errors import PlanError
from weft.inspection.absent_module import AbsentModule
from weft.inspection.blocks import find_blocks
from weft.memory.recompute_context import register_state
from weft.models.decoder import CausalAttention
from weft.parallel.context.attention import gather_documents
from weft.pipeline.rank_model import rank_model
from weft.run_file import Run

TOKEN_BYTES = 8


def number_documents(tokens: Tensor, end: int) -> Tensor:
    """Which document of its sequence each token [batch, sequence] is in; the end token is the last of its own."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def separate_documents(model: nn.Module, end: int, axis: Axis) -> None:
    """Let no token of a model's input see another document's; `end` ends a document, `axis` is `context`."""
    own = rank_model(model)
    stages = own.models
    if not any(isinstance(module, CausalAttention) for stage in stages for module in _with_elsewhere(stage)):
        raise PlanError(f"data.documents = 'separate' needs weft's own attention, which {type(model).__name__} lacks")
    gathered = WeakTensorKeyDictionary()
    for stage in stages:
        # The last of its hooks: a pipeline that only looks for a batch's way through the stage does not come here.
        stage.register_forward_pre_hook(partial(_tell, _Documents(stage), end, axis, gathered))
        if own.pipeline is not None:  # when a block is computed again, a later micro-batch has come
            for block in find_blocks(stage).values():
                register_state(block, _Documents(block))


def _with_elsewhere(model: nn.Module) -> Iterator[nn.Module]:
    """A model's modules, and those of other stages that it has stand-ins for."""
    for module in model.modules():
        yield from module.__dict__["stands_for"].modules() if isinstance(module, AbsentModule) else (module,)


class _Documents:
    """The documents that the attentions of a module tell apart."""

    def __init__(self, module: nn.Module) -> None:
        self._attentions = [inner for inner in module.modules() if isinstance(inner, CausalAttention)]

    def get(self) -> Tensor | None:
        return self._attentions[0].documents if self._attentions else None

    def set(self, value: Tensor | None) -> None:
        for attention in self._attentions:
            attention.documents = value


def _tell(
    documents: _Documents, end: int, axis: Axis, gathered: MutableMapping[Tensor, Tensor], _: nn.Module, args: Any
) -> None:
    """Several stages of a rank see the same tokens, which are gathered once."""
    tokens = args[0]
    whole = gathered.get(tokens) if axis.degree > 1 else tokens
    if whole is None:
        whole = gathered[tokens] = gather_documents(tokens, axis)
    documents.set(number_documents(whole, end))


def has_separate_documents(run: Run) -> bool:
    """Whether the run's data is of documents that must not see each other."""
    return isinstance(run.data, DataConfig) and run.data.documents == "separate"


def document_traffic(run: Run) -> dict[Key, Traffic]:
    """What telling documents apart says in a step: a micro-batch's tokens, gathered over `context`."""
    if not has_separate_documents(run) or run.plan.context.degree == 1:
        return {}
    one = Traffic(1, run.split.micro_batch * run.split.sequence * TOKEN_BYTES)
    return {("context", "all_gather"): one * run.split.accumulation}
