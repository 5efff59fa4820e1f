"""Loads the model to serve from a run folder, a checkpoint or a Hugging Face folder, with all that answers need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from weft.checkpoint import Checkpoint
from weft.data.chat_template import load_template
from weft.data.config import ChatConfig
from weft.data.tokenizer import Tokenizer
from weft.errors import ConfigError
from weft.saved_run import saved_data, saved_tokenizer, with_intact_checkpoint
from weft.serve.generate import load_for_generation
from weft.serve.grammar import Grammars
from weft.serve.rank_part import RankPlace
from weft.serve.served_model import ServedModel, end_tokens

Say = Callable[[str], None]


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights. `weights` names them: the step of a run, or the folder."""

    model: nn.Module
    tokenizer: Tokenizer
    tokenizer_path: str  # or "bytes"
    context_length: int
    template_path: str | None
    weights: str

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        """The tokens that end an answer."""
        path = Path(self.tokenizer_path)
        folder = None if self.tokenizer_path == "bytes" else path if path.is_dir() else path.parent
        return end_tokens(self.tokenizer, folder)

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the schemas that answers match."""
        return Grammars(self.tokenizer, self.end_tokens)

    def served(
        self, name: str, template: str | None, context_length: int, vocab_size: int, adapters: Iterable[str] = ()
    ) -> ServedModel:
        """How clients see the model. `template` is the path of a chat template, if it is not the model's own."""
        chat = load_template(template or self.template_path, self.tokenizer_path)
        names = tuple(adapters)
        if name in names:
            raise ConfigError(f"an adapter is named '{name}', as the model is; give one of them another name")
        sizes = (context_length, vocab_size)
        return ServedModel(name, self.tokenizer, *sizes, self.end_tokens, self.grammars, chat, names)


def load_draft(
    speculate: str | None, tokenizer: str | None, own: Tokenizer, device: torch.device | str
) -> Literal["ngram"] | nn.Module | None:
    """What drafts tokens for an engine: lookup, or the model in a folder, whose tokenizer must be the model's `own`."""
    if speculate is None or speculate == "ngram":
        return "ngram" if speculate else None
    if not Path(speculate).is_dir():
        raise ConfigError(f"--speculate {speculate} is no folder; give ngram, or the folder of a smaller model")
    model, of_draft, _ = load_for_generation(Path(speculate), tokenizer, device)
    if of_draft.fingerprint != own.fingerprint:
        raise ConfigError(
            f"the model in {speculate} has another tokenizer than the model that it drafts for, so its tokens mean "
            f"other texts; give a draft model with the same tokenizer"
        )
    return model


def load_model(
    source: Path, tokenizer: str | None, device: torch.device | str, say: Say, place: RankPlace | None = None
) -> LoadedModel:
    """Load the model at a path, of a run folder the newest that is not damaged. `say` is told of damaged ones. With a
    `place`, the model is the part of the rank there.
    """

    def load(checkpoint: Checkpoint) -> LoadedModel:
        model, own, context = load_for_generation(checkpoint.path, tokenizer, device, place=place)
        data = saved_data(checkpoint)
        template = data.template if isinstance(data, ChatConfig) and tokenizer is None else None
        return LoadedModel(
            model, own, tokenizer or saved_tokenizer(checkpoint), context, template, checkpoint.path.name
        )

    if (source / "config.json").is_file():
        model, own, context = load_for_generation(source, tokenizer, device, place=place)
        return LoadedModel(model, own, tokenizer or str(source), context, None, source.resolve().name)
    return with_intact_checkpoint(source, load, say)
