"""Loads the model to serve from a run folder, a checkpoint or a Hugging Face folder, with all that answers need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.cluster.local_gpus import BF16_CAPABILITY
from weft.data.chat_template import NOTHING, load_template
from weft.data.tokenizer import Tokenizer, encode_text, load_tokenizer
from weft.errors import ConfigError, DataError
from weft.models import LanguageConfig, RecurrentConfig, read_config
from weft.models.hf import FolderWeights
from weft.saved_run import (
    load_saved_tokenizer,
    open_checkpoint,
    refuse_other_template,
    saved_data,
    saved_model,
    saved_template,
    saved_tokenizer,
    saved_values,
    with_intact_checkpoint,
)
from weft.serve.calibration.corrected_codes import corrected_parts, make_room_for_corrected, pack_corrected
from weft.serve.model.adapters import merge_adapter
from weft.serve.model.ranks import ServingRanks
from weft.serve.model.streamed_model import stream_model
from weft.serve.parallel.rank_part import PartValues, build_part, build_whole, refuse_model
from weft.serve.refusals import ServingCase, kind_of, refuse
from weft.serve.scheduling.grammar import Grammars
from weft.serve.scheduling.speculation import LAYERS, EarlyLayers, early_layers
from weft.serve.spec import ServingSpec
from weft.serve.text import ServedModel, end_tokens
from weft.serve.weights.folder_codes import Packed, Quantised, codes_of_folder, make_room_for_codes, packed_linears
from weft.serve.weights.packed_linear import make_room, pack_head
from weft.serve.weights.usable_weights import Read, Say, finite
from weft.serve.weights.weight_formats import HEAD_FORMATS, weight_format

PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}
CALIBRATION_ROWS, CALIBRATION_WIDTH, CALIBRATION_BATCH = 128, 512, 8
# Options that change how a model is loaded; others are asked for when it is served.
LOADED = ("precision", "weights", "calibration", "head", "merge_adapter", "stream_weights", "resident_blocks")


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
        return end_tokens(self.tokenizer, self.tokenizer_folder)

    @property
    def tokenizer_folder(self) -> Path | None:
        """Where files beside the tokenizer are; None for bytes."""
        path = Path(self.tokenizer_path)
        return None if self.tokenizer_path == "bytes" else path if path.is_dir() else path.parent

    @cached_property
    def grammars(self) -> Grammars:
        """Compiles the schemas that answers match."""
        return Grammars(self.tokenizer, self.end_tokens)

    def served(
        self,
        name: str,
        template: str | None,
        context_length: int,
        vocab_size: int,
        adapters: Iterable[str] = (),
        defaults: Mapping[str, Any] = NOTHING,
    ) -> ServedModel:
        """Returns how clients see the model. `template` is the path of a template that replaces the model's own;
        `defaults` are those of a request's keys.
        """
        chat = load_template(template or self.template_path, self.tokenizer_path)
        names = tuple(adapters)
        if name in names:
            raise ConfigError(f"an adapter is named '{name}', as the model is; give one of them another name")
        sizes = (context_length, vocab_size)
        return ServedModel(name, self.tokenizer, *sizes, self.end_tokens, self.grammars, chat, names, defaults)


@dataclass(frozen=True)
class _Saved:
    """A model as it is saved: its config, what reads its weights, and what answers need beside them."""

    path: Path
    config: LanguageConfig
    dtype: torch.dtype
    read: Read
    tokenizer: Tokenizer
    tokenizer_path: str
    context_length: int
    template_path: str | None = None
    name: str = ""
    quantised: Quantised | None = None  # codes of its weights, which are taken over


def quiet(message: str) -> None:
    """Tell nobody."""


def load_model(
    source: Path,
    spec: ServingSpec = ServingSpec(),  # noqa: B008 (a frozen value)
    device: torch.device | str = "cpu",
    say: Say = quiet,
    ranks: ServingRanks | None = None,
) -> LoadedModel:
    """Load the model at a path; of a run folder, the newest checkpoint that is not damaged. `say` is told of damaged
    ones, and of quantised weights that are dequantised. With `ranks`, the model is this rank's part. On a GPU that
    supports it, the model computes in bf16; elsewhere in `spec.precision` or, without one, in that of `computes_in`.
    Weights that a Hugging Face folder has quantised stay so (`serve/weights/folder_codes.py`). With
    `spec.stream_weights`, blocks are read to where they stay; but if their weights are changed when all have been read,
    the model stays in host memory.
    """

    where, config = torch.device(device), model_config(source)
    refuse_model(config)
    refuse(ServingCase.of(spec, LOADED, on_ranks=ranks is not None, model=kind_of(config), device=where.type))

    def load(saved: _Saved) -> LoadedModel:
        model = _load(saved, spec, where, say, ranks)
        return LoadedModel(
            model, saved.tokenizer, saved.tokenizer_path, saved.context_length, saved.template_path, saved.name
        )

    if (source / "config.json").is_file():
        return load(_saved_folder(source, spec, say, ranks))
    return with_intact_checkpoint(source, lambda one: load(_saved_checkpoint(one, spec)), say)


def load_for_generation(
    path: Path, tokenizer: str | None = None, device: torch.device | str = "cpu", say: Say = quiet
) -> tuple[nn.Module, Tokenizer, int]:
    """Load the model, tokenizer and context length of a run folder, a checkpoint folder or a Hugging Face folder."""
    loaded = load_model(path, ServingSpec(tokenizer=tokenizer), device, say)
    return loaded.model, loaded.tokenizer, loaded.context_length


def load_draft(
    spec: ServingSpec, own: Tokenizer, device: torch.device | str
) -> Literal["ngram"] | EarlyLayers | nn.Module | None:
    """Return what drafts tokens for an engine: lookup, the model's first layers (layers=K), or the model in a folder,
    whose tokenizer must be the model's `own`. On a CPU it computes in the precision of the spec, if it has one.
    """
    speculate = spec.speculate
    if speculate is None or speculate == "ngram":
        return "ngram" if speculate else None
    if speculate.startswith(LAYERS):
        return early_layers(speculate)
    if not Path(speculate).is_dir():
        raise ConfigError(
            f"--speculate {speculate} is no folder; give ngram, layers=K for the model's first K layers, or the folder "
            f"of a smaller model"
        )
    draft = ServingSpec(tokenizer=spec.tokenizer, precision=spec.precision)
    loaded = load_model(Path(speculate), draft, device)
    if loaded.tokenizer.fingerprint != own.fingerprint:
        raise ConfigError(
            f"the model in {speculate} has another tokenizer than the model that it drafts for, so its tokens mean "
            f"other texts; give a draft model with the same tokenizer"
        )
    return loaded.model


def model_config(path: Path) -> LanguageConfig:
    """Returns the config of the model at a path."""
    if (path / "config.json").is_file():
        return read_config(path)
    return with_intact_checkpoint(path, saved_model, quiet)  # it is said when the weights are read


def computes_in(path: Path) -> torch.dtype:
    """Returns the dtype in which the model at a path computes on a CPU: that of a run's saved weights, else float32."""
    if (path / "config.json").is_file():
        return torch.float32
    return open_checkpoint(path).entries("parameter")[0].dtype


def _saved_folder(path: Path, spec: ServingSpec, say: Say, ranks: ServingRanks | None) -> _Saved:
    """Reads what a Hugging Face folder has, but for the values of its weights."""
    config = read_config(path)
    folder = FolderWeights(path, config)
    quantised = None
    if folder.quantisation is not None:
        for note in folder.quantisation.notes:
            say(note)
        is_corrected = spec.calibration is not None and ranks is None  # which such codes are refused for
        if spec.weights is None or is_corrected:
            quantised = folder.quantised
        else:
            name = folder.quantisation.name
            say(f"the folder's weights ({name}) are dequantised and rounded a second time, as --weights asks")
    tokenizer = spec.tokenizer or str(path / "tokenizer.json")
    if not spec.tokenizer and not Path(tokenizer).is_file():
        raise ConfigError(f"{path} has no tokenizer.json; pass --tokenizer bytes or a tokenizer.json")
    return _Saved(
        path,
        config,
        torch.float32,
        finite(folder.read, path),
        load_tokenizer(tokenizer),
        spec.tokenizer or str(path),
        config.context_length,
        name=path.resolve().name,
        quantised=quantised,
    )


def _saved_checkpoint(checkpoint: Checkpoint, spec: ServingSpec) -> _Saved:
    """Reads what a checkpoint of a run has, but for the values of its weights."""
    if spec.tokenizer is None and spec.chat_template is None:
        refuse_other_template(checkpoint)
    return _Saved(
        checkpoint.path,
        saved_model(checkpoint),
        checkpoint.entries("parameter")[0].dtype,
        finite(saved_values(checkpoint), checkpoint.path),
        load_saved_tokenizer(checkpoint) if spec.tokenizer is None else load_tokenizer(spec.tokenizer),
        spec.tokenizer or saved_tokenizer(checkpoint),
        saved_data(checkpoint).sequence,
        saved_template(checkpoint) if spec.tokenizer is None else None,
        checkpoint.path.name,
    )


def _load(saved: _Saved, spec: ServingSpec, device: torch.device, say: Say, ranks: ServingRanks | None) -> nn.Module:
    """Returns the model, or a rank's part of it, with its weights. It is made without initial values, which would take
    long.
    """
    config = saved.config
    if ranks is None or isinstance(config, RecurrentConfig):
        model, cuts = build_whole(config)
    else:
        model, cuts = build_part(config, ranks.place)
    assert not list(model.buffers()), "buffers would be left without values"
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    model.to(torch.bfloat16 if has_bf16 else PRECISIONS.get(spec.precision or "", saved.dtype))
    form = None if spec.weights is None else weight_format(spec.weights, device)
    texts = list[Tensor]()
    if spec.calibration is not None:
        texts = calibration_texts(Path(spec.calibration), saved.tokenizer, saved.context_length, config.vocab_size)
    packed: Packed | None = None
    if saved.quantised is not None:
        for reason in make_room_for_codes(model, cuts, saved.quantised):
            say(f"{reason}, to {next(model.parameters()).dtype}")
        packed = partial(codes_of_folder, cuts, saved.quantised)
    elif form is not None and texts and ranks is not None:
        make_room_for_corrected(model, cuts, form)
        packed = corrected_parts(model, cuts, saved.read, form, [text.to(device) for text in texts])
    elif form is not None and not texts:
        make_room(model, form)
    is_changed = bool(texts) or spec.head in HEAD_FORMATS or spec.merge_adapter is not None
    on_host = spec.stream_weights > 0 and is_changed
    values = PartValues(model, cuts, saved.read, torch.device("cpu") if on_host else device, packed)
    if spec.stream_weights and not on_host:
        return stream_model(model, device, spec, ranks, values)
    values.give_all()
    model.eval()
    if form is not None and texts and ranks is None:
        if next(packed_linears(model), None) is not None:
            raise ConfigError(
                "--calibration corrects the rounding of whole weights, and those of this folder are in fewer bits "
                "already; leave out --calibration and --weights"
            )
        pack_corrected(model, form, [text.to(next(model.parameters()).device) for text in texts])
    if spec.merge_adapter is not None:
        merge_adapter(model, Path(spec.merge_adapter))
    pack_head(model, spec.head, device)
    return model


def calibration_texts(path: Path, tokenizer: Tokenizer, context_length: int, vocab_size: int) -> list[Tensor]:
    """Returns the beginning of a text file as rows of tokens, `CALIBRATION_BATCH` rows at a time. Raises DataError for
    a token that a model of `vocab_size` tokens does not know.
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
    """Returns how many tokens a model knows."""
    config = model.config
    assert isinstance(config, LanguageConfig)
    return config.vocab_size
