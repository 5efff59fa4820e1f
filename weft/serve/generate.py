"""Generates text with a trained model in one process, token by token, without a key-value cache."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from weft.checkpoint import Checkpoint
from weft.cluster.local_gpus import BF16_CAPABILITY
from weft.data.tokenizer import Tokenizer, load_tokenizer
from weft.errors import ConfigError, NumbersError
from weft.models import GPT2, Decoder, LanguageConfig, build, read_config, read_weights
from weft.saved_run import parameter_reader, saved_data, saved_model, saved_tokenizer, with_intact_checkpoint


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
    read = parameter_reader(checkpoint)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read(name))
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


def _choose(logits: torch.Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> torch.Tensor:
    if temperature == 0:
        return logits.argmax(keepdim=True)
    scaled = logits / temperature
    if top_k is not None and top_k < scaled.numel():
        scaled[scaled < scaled.topk(top_k).values[-1]] = float("-inf")
    return torch.multinomial(scaled.softmax(-1), 1, generator=generator)
