"""Generates text with a trained model in one process, token by token, without a key-value cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import torch
from torch import nn

from weft.checkpoint import Checkpoint, steps
from weft.checkpoint.folder import step_name
from weft.checkpoint.model_state import load_parameters
from weft.cluster.local_gpus import BF16_CAPABILITY
from weft.data.config import DataConfig
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import CheckpointError, ConfigError, DamagedError, NumbersError
from weft.models import GPT2, Decoder, LanguageConfig, build, config_from_table, read_config, read_weights
from weft.models.hf import parameter_shapes
from weft.schema import build_dataclass, parse_toml

T = TypeVar("T")
MAX_SIZE = 2**27  # the limit for any number in the model table of a checkpoint


def generate(
    model: nn.Module,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int = 200,
    temperature: float = 0.8,
    top_k: int | None = 50,
    seed: int = 0,
    context: int = 1024,
    seconds: float = math.inf,
) -> str:
    """Generate up to `num_tokens` tokens after the prompt. Stops earlier at the end of the document or after `seconds`.
    Temperature 0 takes the most likely token.
    """
    device, deadline = next(model.parameters()).device, time.monotonic() + seconds
    tokens = torch.from_numpy(np.asarray(tokenizer.encode(prompt), dtype=np.int64))
    if tokens.numel() == 0:
        tokens = torch.tensor([tokenizer.end])
    start = tokens.numel()
    generator = torch.Generator().manual_seed(seed)
    with torch.inference_mode():
        for _ in range(num_tokens):
            if time.monotonic() > deadline:
                break
            given = tokens[None, -context:].to(device)
            logits = model(given)[0, -1].float()[: tokenizer.vocab_size].cpu()  # [vocab]
            if logits.isnan().any():
                raise NumbersError(
                    f"the model gives NaN after {tokens.numel()} tokens: its weights are damaged or its training "
                    f"diverged; use an older checkpoint"
                )
            chosen = _choose(logits, temperature, top_k, generator)
            if int(chosen) == tokenizer.end:
                break
            tokens = torch.cat([tokens, chosen])
    return tokenizer.decode(tokens[start:].numpy())


def load_for_generation(
    path: Path,
    tokenizer: str | None = None,
    device: torch.device | str = "cpu",
    say: Callable[[str], None] = lambda message: None,
) -> tuple[nn.Module, Tokenizer, int]:
    """Load the model, tokenizer and context length of a run folder, a checkpoint folder or a Hugging Face folder. On a
    GPU that supports it, the model computes in bf16. `say` is told of damaged checkpoints that are left out.
    """
    device = torch.device(device)
    if (path / "config.json").is_file():
        config = read_config(path)
        model = _empty(config, device)
        read_weights(path, model)
        spec = tokenizer or str(path / "tokenizer.json")
        if not tokenizer and not Path(spec).is_file():
            raise ConfigError(f"{path} has no tokenizer.json; pass --tokenizer bytes or a tokenizer.json")
        context = int(getattr(config, "n_positions", 0) or getattr(config, "max_position_embeddings", 1024))
        return _prepare(model, device), load_tokenizer(spec), context
    return with_intact_checkpoint(path, partial(_load_checkpoint, tokenizer=tokenizer, device=device), say)


def _load_checkpoint(
    checkpoint: Checkpoint, tokenizer: str | None, device: torch.device
) -> tuple[nn.Module, Tokenizer, int]:
    saved = saved_model(checkpoint)
    data = saved_data(checkpoint)
    model = _empty(saved, device).to(checkpoint.entries("parameter")[0].dtype)
    load_parameters(checkpoint, model)
    end_token = data.end_token if tokenizer is None else None  # another tokenizer has its own end token
    own = load_tokenizer(tokenizer or saved_tokenizer(checkpoint), end_token=end_token)
    return _prepare(model, device), own, data.sequence


def _empty(config: LanguageConfig, device: torch.device) -> Decoder | GPT2:
    """A model without values, to be read afterwards. Initialising a large model would take long."""
    with torch.device("meta"):
        model = build(config)
    assert not list(model.buffers()), "buffers would be left without values"
    return model.to_empty(device=device)


def _prepare(model: nn.Module, device: torch.device) -> nn.Module:
    has_bf16 = device.type == "cuda" and torch.cuda.get_device_capability(device) >= BF16_CAPABILITY
    return (model.to(torch.bfloat16) if has_bf16 else model).eval()


def saved_model(checkpoint: Checkpoint) -> LanguageConfig:
    """The config of the language model in a checkpoint, without a run file. Raises ConfigError for other models."""
    table = checkpoint.stated("model", dict)
    if any(isinstance(value, int) and abs(value) > MAX_SIZE for value in table.values()):
        raise CheckpointError(
            f"{checkpoint.path} states a model with a size above {MAX_SIZE}; it is not what was saved"
        )
    config = config_from_table(table)
    if not isinstance(config, LanguageConfig):
        raise ConfigError(
            f"{checkpoint.path} is of a model of images ('{config.architecture}'), which writes no text and has no "
            f"Hugging Face folder; read its parameters with weft.checkpoint.Checkpoint"
        )
    _refuse_other_shapes(checkpoint, config)
    return config


def _refuse_other_shapes(checkpoint: Checkpoint, config: LanguageConfig) -> None:
    """Raise CheckpointError unless the config's parameters are those of the checkpoint. Called before memory for the
    model is allocated.
    """
    held = {entry.name: entry.shape for entry in checkpoint.entries("parameter")}
    if config.num_layers > len(held) or parameter_shapes(config) != held:
        raise CheckpointError(f"{checkpoint.path} states a model whose parameters are not those that it holds")


def saved_data(checkpoint: Checkpoint) -> DataConfig:
    """The `[data]` table of a checkpoint's run."""
    data = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("data")
    if not isinstance(data, dict):
        raise CheckpointError(f"{checkpoint.path} states a run without [data]; it was not saved by weft train")
    return build_dataclass(DataConfig, data, "data")


def saved_tokenizer(checkpoint: Checkpoint) -> str:
    """The tokenizer of a checkpoint's run: "bytes", or the path of its file or folder. A relative path starts at the
    folder in which the run was started, if that can be derived from the run's folder, or else at the current folder.
    """
    spec = saved_data(checkpoint).tokenizer
    if spec == "bytes" or Path(spec).is_absolute():
        return spec
    found = [folder / spec for folder in (_started_in(checkpoint), Path()) if folder is not None]
    return str(next((path for path in found if path.exists()), found[0]))


def _started_in(checkpoint: Checkpoint) -> Path | None:
    """The folder in which a checkpoint's run was started; None if the checkpoint was moved since."""
    folder = parse_toml(checkpoint.stated("run", str), str(checkpoint.path)).get("folder")
    if not isinstance(folder, str) or not folder or Path(folder).is_absolute() or ".." in Path(folder).parts:
        return None
    parents, below = checkpoint.path.resolve().parents, Path(folder).parts
    if len(parents) <= 1 + len(below) or parents[1].parts[-len(below) :] != below:  # <folder>/checkpoints/<step>
        return None
    return parents[1 + len(below)]


def with_intact_checkpoint(path: Path, use: Callable[[Checkpoint], T], say: Callable[[str], None]) -> T:
    """Returns `use` of the checkpoint at a path, or of the newest one of a run folder whose files are not damaged.

    `say` is told of each that is left out.
    """
    folder = path / "checkpoints" if steps(path / "checkpoints") else path
    found = [folder / step_name(step) for step in reversed(steps(folder))]
    for newer in found[:-1]:
        try:
            return use(Checkpoint(newer))
        except DamagedError as error:
            say(f"{error}; an older checkpoint is used")
    return use(Checkpoint(found[-1] if found else path))


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    scaled = logits / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = float("-inf")
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
