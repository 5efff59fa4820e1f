"""Attention within documents only, for documents that share a sequence (`data.documents = "separate"`).

Sequences are cut from concatenated documents, so one sequence may hold several. Before every forward, a hook gives each
attention module the document number of each token. In a pipeline, each stage has such a hook, and a block that is
recomputed in backward uses the documents of its own micro-batch. With `context`, a rank needs the numbers of the whole
sequence: tokens are all-gathered once for each micro-batch, 8 bytes a token.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from weft.comm import Axis, Traffic
from weft.comm.ledger import Key
from weft.data.config import ChatConfig, DataConfig
from weft.errors import PlanError
from weft.inspection.annotations import Annotation
from weft.inspection.blocks import AbsentModule, find_blocks
from weft.memory.recompute_context import register_state
from weft.models.attention import CausalAttention
from weft.parallel.context.attention import gather_documents
from weft.pipeline.rank_model import rank_model
from weft.run_file import Run

TOKEN_BYTES = 8


def number_documents(tokens: Tensor, end: int | None) -> Tensor:
    """Numbers the documents of each sequence: for tokens [batch, sequence], the document of each token.

    The token `end` is the last of its own document; if it is None, tokens below 0 are (`data/chat.py`).
    """
    ends = (tokens < 0 if end is None else tokens == end).long()
    return ends.cumsum(1) - ends


_SEPARATES = Annotation[tuple[int | None]]("separates_documents")  # by the token that ends a document


def document_numbers(model: nn.Module, tokens: Tensor) -> Tensor | None:
    """Returns the document of each token [batch, sequence]; None if the model's attention does not separate them."""
    separates = _SEPARATES.get(model)
    return None if separates is None else number_documents(tokens, separates[0])


def separate_documents(model: nn.Module, end: int | None, axis: Axis) -> None:
    """Makes the model's attention ignore tokens of other documents.

    `end` is the token that ends a document. If it is None, the last token of a document is given as ~token, which the
    model's embeddings then take as the token. `axis` is `context`.
    """
    _SEPARATES.set(model, (end,))
    own = rank_model(model)
    stages = own.models
    if not any(isinstance(module, CausalAttention) for stage in stages for module in _with_elsewhere(stage)):
        raise PlanError(f"data.documents = 'separate' needs weft's own attention, which {type(model).__name__} lacks")
    gathered = WeakTensorKeyDictionary()
    for stage in stages:
        for module in stage.modules() if end is None else ():
            if isinstance(module, nn.Embedding):
                module.register_forward_pre_hook(_unmark, prepend=True)
        # Registered after the stage's other hooks: when a pipeline only traces a batch through the stage, it does not
        # reach this hook.
        stage.register_forward_pre_hook(partial(_tell, _Documents(stage), end, axis, gathered))
        if own.pipeline is not None:  # when a block is recomputed, the stage has seen later micro-batches
            for block in find_blocks(stage).values():
                register_state(block, _Documents(block))


def _with_elsewhere(model: nn.Module) -> Iterator[nn.Module]:
    """Yields the model's modules, and those of other stages that it has placeholders for."""
    for module in model.modules():
        yield from module.__dict__["stands_for"].modules() if isinstance(module, AbsentModule) else (module,)


class _Documents:
    """Gets and sets the documents of all attention modules inside a module."""

    def __init__(self, module: nn.Module) -> None:
        self._attentions = [inner for inner in module.modules() if isinstance(inner, CausalAttention)]

    def get(self) -> Tensor | None:
        return self._attentions[0].documents if self._attentions else None

    def set(self, value: Tensor | None) -> None:
        for attention in self._attentions:
            attention.documents = value


def _unmark(_: nn.Module, args: Any) -> Any:
    """A forward pre-hook of embeddings: ~token becomes the token. Positions (GPT-2) are not below 0."""
    return (torch.where(args[0] < 0, ~args[0], args[0]), *args[1:])


def document_end(run: Run) -> int | None:
    """The token that ends a document in the run's data; None if last tokens are marked."""
    return None if isinstance(run.data, ChatConfig) else run.tokenizer.end


def _tell(
    documents: _Documents,
    end: int | None,
    axis: Axis,
    gathered: MutableMapping[Tensor, Tensor],
    _: nn.Module,
    args: Any,
) -> None:
    """A forward pre-hook that sets the documents. Stages of one rank see the same tokens, which are gathered once."""
    tokens = args[0]
    whole = gathered.get(tokens) if axis.degree > 1 else tokens
    if whole is None:
        whole = gathered[tokens] = gather_documents(tokens, axis)
    documents.set(number_documents(whole, end))


def has_separate_documents(run: Run) -> bool:
    """Does the run keep documents separate?"""
    return isinstance(run.data, DataConfig) and run.data.documents == "separate"


def document_traffic(run: Run) -> dict[Key, Traffic]:
    """Traffic of separate documents in a step: each micro-batch's tokens are all-gathered over `context`."""
    if not has_separate_documents(run) or run.plan.context.degree == 1:
        return {}
    one = Traffic(1, run.split.micro_batch * run.split.sequence * TOKEN_BYTES)
    return {("context", "all_gather"): one * run.split.accumulation}
