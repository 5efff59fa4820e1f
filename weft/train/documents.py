"""Documents that share a sequence and must not see each other (`data.documents = "separate"`).

Sequences are cut from documents laid end to end, so one sequence may hold several. From outside the model, each
attention is told before every forward which document each token belongs to. Over `context` the numbers of the whole
sequence are needed: tokens are all-gathered once for each micro-batch, 8 bytes a token.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor, nn

from weft.comm import Axis, Traffic
from weft.comm.ledger import Key
from weft.config import Run
from weft.data.config import DataConfig
from weft.errors import PlanError
from weft.models.decoder import CausalAttention
from weft.parallel.context_attention import gather_documents

TOKEN_BYTES = 8


def number_documents(tokens: Tensor, end: int) -> Tensor:
    """Which document of its sequence each token [batch, sequence] is in; the end token is the last of its own."""
    ends = (tokens == end).long()
    return ends.cumsum(1) - ends


def separate_documents(model: nn.Module, end: int, axis: Axis) -> None:
    """Let no token of a model's input see another document's; `end` ends a document, `axis` is `context`."""
    attentions = [module for module in model.modules() if isinstance(module, CausalAttention)]
    if not attentions:
        raise PlanError(f"data.documents = 'separate' needs weft's own attention, which {type(model).__name__} lacks")
    model.register_forward_pre_hook(partial(_tell, attentions, end, axis))


def _tell(attentions: list[CausalAttention], end: int, axis: Axis, _: nn.Module, args: Any) -> None:
    documents = number_documents(gather_documents(args[0], axis), end)
    for attention in attentions:
        attention.documents = documents


def has_separate_documents(run: Run) -> bool:
    """Whether the run's data is of documents that must not see each other."""
    return isinstance(run.data, DataConfig) and run.data.documents == "separate"


def document_traffic(run: Run) -> dict[Key, Traffic]:
    """What telling documents apart says in a step: a micro-batch's tokens, gathered over `context`."""
    if not has_separate_documents(run) or run.plan.context.degree == 1:
        return {}
    one = Traffic(1, run.split.micro_batch * run.split.sequence * TOKEN_BYTES)
    return {("context", "all_gather"): one * run.split.accumulation}
