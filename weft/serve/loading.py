"""Loads the model to serve from a run folder, a checkpoint or a Hugging Face folder, with all that answers need."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.data.chat_template import load_template
from weft.data.tokenizer import Tokenizer, encode_text
from weft.errors import ConfigError, DataError
from weft.models import LanguageConfig, RecurrentConfig
from weft.saved_run import saved_template, saved_tokenizer, with_intact_checkpoint
from weft.serve.calibration.corrected_codes import pack_corrected
from weft.serve.generate import Texts, load_for_generation, model_config, refuse_for_recurrent
from weft.serve.model.streamed_model import Streaming
from weft.serve.parallel.rank_part import RankPlace
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.speculation import LAYERS, EarlyLayers, early_layers
from weft.serve.served_model import ServedModel, end_tokens
from weft.serve.weights.folder_codes import packed_linears
from weft.serve.weights.packed_linear import pack_head
from weft.serve.weights.weight_formats import HEAD_FORMATS, WeightFormat, weight_format

Say = Callable[[str], None]
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CALIBRATION_ROWS, CALIBRATION_WIDTH, CALIBRATION_BATCH = 128, 512, 8


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
    speculate: str | None,
    tokenizer: str | None,
    own: Tokenizer,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
) -> Literal["ngram"] | EarlyLayers | nn.Module | None:
    """What drafts tokens for an engine: lookup, the model's first layers (layers=K), or the model in a folder, whose
    tokenizer must be the model's `own`. On a CPU it computes in `dtype`, or without one as its weights say.
    """
    if speculate is None or speculate == "ngram":
        return "ngram" if speculate else None
    if speculate.startswith(LAYERS):
        return early_layers(speculate)
    if not Path(speculate).is_dir():
        raise ConfigError(
            f"--speculate {speculate} is no folder; give ngram, layers=K for the model's first K layers, or the folder "
            f"of a smaller model"
        )
    model, of_draft, _ = load_for_generation(Path(speculate), tokenizer, device, dtype=dtype)
    if of_draft.fingerprint != own.fingerprint:
        raise ConfigError(
            f"the model in {speculate} has another tokenizer than the model that it drafts for, so its tokens mean "
            f"other texts; give a draft model with the same tokenizer"
        )
    return model


@dataclass(frozen=True)
class Packing:
    """How weights are kept: the name of a format of fewer bits, the path of a text by which rounding is corrected,
    --head, and --precision.
    """

    weights: str | None
    calibration: str | None = None
    head: str | None = None
    precision: str | None = None

    def dtype(self, device: torch.device | str) -> torch.dtype | None:
        """The dtype in which the model computes; None: as its weights say. Raises ConfigError."""
        if self.precision is None:
            return None
        if torch.device(device).type != "cpu":
            raise ConfigError(
                f"--precision {self.precision} is for CPUs; a GPU computes in bf16 if it can, else as the weights are "
                f"saved; leave it out"
            )
        if self.precision not in PRECISIONS:
            raise ConfigError(f"--precision {self.precision} is unknown; give {' or '.join(PRECISIONS)}")
        return PRECISIONS[self.precision]

    def at_reading(self, device: torch.device | str) -> WeightFormat | None:
        """The format in which weights are read; None if the whole model is read first."""
        found = None if self.weights is None else weight_format(self.weights, device)
        return found if self.calibration is None else None

    def on_ranks(self, device: torch.device | str) -> tuple[WeightFormat | None, Texts | None]:
        """The format of a rank's part, and the calibration text, given a tokenizer and a context length."""
        found = None if self.weights is None else weight_format(self.weights, device)
        return found, None if self.calibration is None else partial(calibration_texts, Path(self.calibration))

    @property
    def needs_whole_model(self) -> bool:
        """Is the whole model read before some of it is packed?"""
        return self.calibration is not None or self.head in HEAD_FORMATS

    def correct(self, model: nn.Module, tokenizer: Tokenizer, context_length: int) -> None:
        """Pack a whole model by the calibration text, if there is one."""
        if self.calibration is None or self.weights is None:
            return
        if next(packed_linears(model), None) is not None:
            raise ConfigError(
                "--calibration corrects the rounding of whole weights, and those of this folder are in fewer bits "
                "already; leave out --calibration and --weights"
            )
        device = next(model.parameters()).device
        texts = calibration_texts(Path(self.calibration), tokenizer, context_length, model_vocab_size(model))
        pack_corrected(model, weight_format(self.weights), [text.to(device) for text in texts])


def calibration_texts(path: Path, tokenizer: Tokenizer, context_length: int, vocab_size: int) -> list[Tensor]:
    """The beginning of a text file as rows of tokens, some rows at a time, for a model that knows `vocab_size` tokens.
    Raises DataError.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read the calibration text {path} ({error}); give a file of UTF-8 text") from None
    width = min(context_length, CALIBRATION_WIDTH)
    tokens = torch.tensor(encode_text(tokenizer, text[: 64 * CALIBRATION_ROWS * width]))
    rows = tokens[: len(tokens) // width * width].view(-1, width)[:CALIBRATION_ROWS]
    if not len(rows):
        raise DataError(f"the calibration text {path} has {len(tokens)} tokens; give one of at least {width}")
    largest = int(rows.max())
    if largest >= vocab_size:
        raise DataError(
            f"the calibration text {path} has token {largest}, and the model has {vocab_size} tokens, 0 to "
            f"{vocab_size - 1}; give the model's own tokenizer by --tokenizer"
        )
    return list(rows.split(CALIBRATION_BATCH))


def model_vocab_size(model: nn.Module) -> int:
    """How many tokens a model knows."""
    config = model.config
    assert isinstance(config, LanguageConfig)
    return config.vocab_size


def load_model(
    source: Path,
    tokenizer: str | None,
    device: torch.device | str,
    say: Say,
    place: RankPlace | None = None,
    packing: Packing | None = None,
    streaming: Streaming | None = None,
    is_changed: bool = False,
) -> LoadedModel:
    """Load the model at a path, of a run folder the newest that is not damaged. `say` is told of damaged ones. With a
    `place`, the model is the part of the rank there. With `streaming`, blocks are read to where they stay; but if their
    weights are changed when all have been read, by `packing` or because `is_changed`, the model stays in host memory.
    """

    def read(path: Path) -> tuple[nn.Module, Tokenizer, int]:
        kept = packing or Packing(None)
        if kept.calibration is not None and isinstance(model_config(path), RecurrentConfig):  # packed when it is read
            refuse_for_recurrent({"--weights": kept.weights, "--calibration": kept.calibration})
        weights, texts = (kept.at_reading(device), None) if place is None else kept.on_ranks(device)
        on_host = streaming is not None and (is_changed or kept.needs_whole_model)
        given = (place, weights, on_host, None if on_host else streaming, texts, kept.dtype(device))
        model, own, context = load_for_generation(path, tokenizer, device, say, *given)
        if place is None:
            kept.correct(model, own, context)
        pack_head(model, kept.head, device)
        return model, own, context

    def load(checkpoint: Checkpoint) -> LoadedModel:
        model, own, context = read(checkpoint.path)
        template = saved_template(checkpoint) if tokenizer is None else None
        return LoadedModel(
            model, own, tokenizer or saved_tokenizer(checkpoint), context, template, checkpoint.path.name
        )

    if (source / "config.json").is_file():
        model, own, context = read(source)
        return LoadedModel(model, own, tokenizer or str(source), context, None, source.resolve().name)
    return with_intact_checkpoint(source, load, say)
