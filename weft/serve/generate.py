"""Loads a trained model, and generates text with it in one process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from weft.checkpoint import Checkpoint
from weft.cluster.local_gpus import BF16_CAPABILITY
from weft.data.tokenizer import Tokenizer, encode_text, load_tokenizer
from weft.errors import ConfigError
from weft.models import LanguageConfig, RecurrentConfig, read_config
from weft.models.hf import FolderWeights
from weft.models.hf_quantisation import Quantisation
from weft.saved_run import (
    load_saved_tokenizer,
    open_checkpoint,
    saved_data,
    saved_model,
    saved_values,
    with_intact_checkpoint,
)
from weft.serve.attention.layer_cache import CacheFormat, PlainFormat
from weft.serve.cache_formats import block_size_of
from weft.serve.calibration.corrected_blocks import corrected_parts, make_room_for_corrected
from weft.serve.engine import Engine, EngineOptions
from weft.serve.head.graph_head import GraphHead
from weft.serve.model.streamed_model import Streaming, stream_model
from weft.serve.parallel.rank_part import PartValues, RankPlace, build_part, build_whole, refuse_model
from weft.serve.scheduling.request import Request, RequestError, Sampling
from weft.serve.scheduling.speculation import EarlyLayers
from weft.serve.weights.folder_codes import Packed, Quantised, codes_of_folder, make_room_for_codes
from weft.serve.weights.packed_linear import make_room
from weft.serve.weights.usable_weights import finite
from weft.serve.weights.weight_formats import WeightFormat

# Rows of a calibration text, by tokenizer, context length and the number of tokens that the model knows.
Texts = Callable[[Tokenizer, int, int], Sequence[Tensor]]


@dataclass(frozen=True)
class _Wanted:
    """How a model is to be loaded, as `load_for_generation` is asked."""

    device: torch.device
    place: RankPlace | None
    weights: WeightFormat | None
    on_host: bool
    streaming: Streaming | None
    texts: Texts | None
    say: Callable[[str], None]
    dtype: torch.dtype | None  # None: as the model says


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str | Sequence[int],
    *,
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    context: int = 1024,
    seconds: float = math.inf,
    speculate: Literal["ngram"] | EarlyLayers | nn.Module | None = None,
    cache: CacheFormat | None = None,
    head: GraphHead | None = None,
    stop_tokens: frozenset[int] = frozenset(),
) -> str:
    """Generate up to `num_tokens` tokens after the prompt, a text or its tokens. Stops earlier at the end of the
    document, at one of `stop_tokens` or after `seconds`.
    Temperature 0 takes the most likely token. When the context is full, generation goes on after its second half.
    `speculate` drafts tokens (`serve/scheduling/speculation.py`); the text is the same. `cache` is how keys and values
    are kept, `head` how the likeliest tokens are found.
    """
    deadline = time.monotonic() + seconds
    options = EngineOptions(
        max_running=1,
        context_length=context,
        vocab_size=tokenizer.vocab_size,
        speculate=speculate,
        cache=cache,
        head=head,
        block_size=block_size_of(cache or PlainFormat()),
    )
    engine = Engine(model, options)
    tokens = encode_text(tokenizer, prompt) if isinstance(prompt, str) else list(prompt)
    tokens = tokens or [tokenizer.end]
    start, given, number = len(tokens), tokens[-engine.context_length :], 0
    while len(tokens) < start + num_tokens:
        sampling = Sampling(temperature=temperature, top_k=top_k or 0, seed=seed + (number << 32))
        left = start + num_tokens - len(tokens)
        try:
            engine.add(Request("text", tuple(given), left, sampling, stop_tokens | {tokenizer.end}))
        except RequestError as error:  # here the caller gave all that a request has, so it is a wrong setting
            raise ConfigError(str(error)) from None
        while engine.has_work():
            for generated in engine.step():
                generated.require_number()
                if generated.finish == "stop":
                    return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))
                tokens.append(generated.token)
            if time.monotonic() > deadline:
                return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))
        given, number = tokens[-max(1, engine.context_length // 2) :], number + 1
    return tokenizer.decode(np.array(tokens[start:], dtype=np.int64))


def load_for_generation(
    path: Path,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda message: None,
    place: RankPlace | None = None,
    weights: WeightFormat | None = None,
    on_host: bool = False,
    streaming: Streaming | None = None,
    texts: Texts | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[nn.Module, Tokenizer, int]:
    """Load the model, tokenizer and context length of a run folder, a checkpoint folder or a Hugging Face folder.

    On a GPU that supports it, the model computes in bf16, elsewhere in `dtype` or, without one, in that of
    `computes_in`. `say` is told of damaged checkpoints that are left out. With a `place`, the model is the part of the
    rank there. `weights` is the format of linears, if not the model's dtype.
    `on_host`: the model stays in host memory, in the dtype in which the device computes. With `streaming`, blocks are
    read to where they stay, in host memory or on the device. Weights that a Hugging Face folder has in fewer bits stay
    so (`serve/weights/folder_codes.py`); `say` is told which do not. By `texts`, the rounding of `weights` is
    corrected, block by block (`serve/calibration/corrected_blocks.py`).
    """
    wanted = _Wanted(torch.device(device), place, weights, on_host, streaming, texts, say, dtype)
    if (path / "config.json").is_file():
        config = read_config(path)
        folder = FolderWeights(path, config)
        quantised = None
        if folder.quantisation is not None:
            quantised = _codes(folder, folder.quantisation, weights, say)
        own = _folder_tokenizer(path, tokenizer)
        rows = None if texts is None else texts(own, config.context_length, config.vocab_size)
        read = finite(folder.read, path)
        return _load(config, computes_in(path), read, wanted, rows, quantised), own, config.context_length
    return with_intact_checkpoint(path, partial(_load_checkpoint, tokenizer=tokenizer, wanted=wanted), say)


def _folder_tokenizer(path: Path, tokenizer: str | None) -> Tokenizer:
    """The tokenizer of a folder with a config.json, or the one that is asked for."""
    spec = tokenizer or str(path / "tokenizer.json")
    if not tokenizer and not Path(spec).is_file():
        raise ConfigError(f"{path} has no tokenizer.json; pass --tokenizer bytes or a tokenizer.json")
    return load_tokenizer(spec)


def model_config(path: Path) -> LanguageConfig:
    """The config of the model at a path."""
    if (path / "config.json").is_file():
        return read_config(path)
    return with_intact_checkpoint(path, saved_model, lambda message: None)  # it is said when the weights are read


def computes_in(path: Path) -> torch.dtype:
    """The dtype in which the model at a path computes on a CPU: that of a run's saved weights, else float32."""
    if (path / "config.json").is_file():
        return torch.float32
    return open_checkpoint(path).entries("parameter")[0].dtype


def _load_checkpoint(
    checkpoint: Checkpoint, tokenizer: str | None, wanted: _Wanted
) -> tuple[nn.Module, Tokenizer, int]:
    saved, data = saved_model(checkpoint), saved_data(checkpoint)
    dtype = checkpoint.entries("parameter")[0].dtype
    own = load_saved_tokenizer(checkpoint) if tokenizer is None else load_tokenizer(tokenizer)
    rows = None if wanted.texts is None else wanted.texts(own, data.sequence, saved.vocab_size)
    read = finite(saved_values(checkpoint), checkpoint.path)
    return _load(saved, dtype, read, wanted, rows), own, data.sequence


def _load(
    config: LanguageConfig,
    dtype: torch.dtype,
    read: Callable[[str], Tensor],
    wanted: _Wanted,
    texts: Sequence[Tensor] | None = None,
    quantised: Quantised | None = None,
) -> nn.Module:
    """A model, or a rank's part of it, with its weights. It is made without initial values, which would take long.
    `quantised` gives codes that are taken over, `texts` are rows of tokens by which rounding is corrected.
    """
    refuse_model(config)
    place, weights, device = wanted.place, wanted.weights, wanted.device
    if isinstance(config, RecurrentConfig):
        _refuse_recurrent(wanted)
        model, cuts = build_whole(config)
    else:
        model, cuts = build_whole(config) if place is None else build_part(config, place)
    assert not list(model.buffers()), "buffers would be left without values"
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    model.to(torch.bfloat16 if has_bf16 else wanted.dtype or dtype)
    packed: Packed | None = None
    if quantised is not None:
        for reason in make_room_for_codes(model, cuts, quantised):
            wanted.say(f"{reason}, to {next(model.parameters()).dtype}")
        packed = partial(codes_of_folder, cuts, quantised)
    elif weights is not None and texts is not None:
        make_room_for_corrected(model, cuts, weights)
        packed = corrected_parts(model, cuts, read, weights, [text.to(device) for text in texts])
    elif weights is not None:
        make_room(model, weights)
    values = PartValues(model, cuts, read, torch.device("cpu") if wanted.on_host else device, packed)
    if wanted.streaming is not None:
        return stream_model(model, device, wanted.streaming, values)
    values.give_all()
    return model.eval()


def _refuse_recurrent(wanted: _Wanted) -> None:
    """Raise ConfigError for ways to load that a recurrent model does not have."""
    is_streamed = wanted.on_host or wanted.streaming is not None
    given = {"the plan": wanted.place, "--weights": wanted.weights, "--calibration": wanted.texts}
    refuse_for_recurrent({**given, "--stream-weights": is_streamed or None})


def refuse_for_recurrent(given: Mapping[str, object | None]) -> None:
    """Raise ConfigError if one of these options, which a recurrent model does not have, is given: it is not None."""
    names = [name for name, one in given.items() if one is not None]
    if names:
        raise ConfigError(
            f"a recurrent model is served on one rank, with its weights as they are, on the device; leave out "
            f"{' and '.join(names)}"
        )


def _codes(
    folder: FolderWeights, quantisation: Quantisation, weights: WeightFormat | None, say: Callable[[str], None]
) -> Quantised | None:
    """The codes of a folder's weights to take over; None if they are rounded again to another format."""
    for note in quantisation.notes:
        say(note)
    if weights is None:
        return folder.quantised
    say(f"the folder's weights ({quantisation.name}) are decoded and rounded a second time, as --weights asks")
    return None
