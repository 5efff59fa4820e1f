"""Recurrent language models: an embedding, torch's LSTM or GRU, and a head. Their folders: config.json, safetensors.

The modules are torch's own, so any training loop trains them, and checkpoints of torch's LSTM and GRU fit. `weft serve`
and `weft generate` read the folders that `save_recurrent` writes, and compute faster steps
(`serve/model/recurrent.py`).
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from weft.architectures.recurrent import RecurrentConfig
from weft.errors import CheckpointError, ConfigError
from weft.schema import build_dataclass

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"
KIND = "weft_recurrent"  # the model_type of config.json


class RecurrentModel(nn.Module):
    """Logits of each next token, by layers of LSTM or GRU."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        kind = nn.LSTM if config.architecture == "lstm" else nn.GRU
        self.rnn = kind(config.hidden_size, config.hidden_size, config.num_hidden_layers, batch_first=True)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Logits [batch, sequence, vocab] after tokens [batch, sequence]."""
        hidden, _ = self.rnn(self.embed_tokens(tokens))
        logits: Tensor = self.lm_head(hidden)
        return logits


def save_recurrent(folder: Path, model: RecurrentModel) -> None:
    """Write a folder that `load_recurrent` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"model_type": KIND, **asdict(model.config)}
    (folder / CONFIG_FILE).write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
    tensors = {name: one.detach().cpu().contiguous() for name, one in model.named_parameters()}
    save_file(tensors, folder / WEIGHTS_FILE)


def is_recurrent(folder: Path) -> bool:
    """Does a folder hold a recurrent model?"""
    try:
        about = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(about, dict) and about.get("model_type") == KIND


def recurrent_config(folder: Path) -> RecurrentConfig:
    """The config of a folder for which `is_recurrent` holds. Raises ConfigError."""
    about = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    return build_dataclass(RecurrentConfig, {key: one for key, one in about.items() if key != "model_type"})


def load_recurrent(folder: Path) -> RecurrentModel:
    """The model of a folder, on the CPU. Raises ConfigError or CheckpointError."""
    config = recurrent_config(folder)
    with torch.device("meta"):
        model = RecurrentModel(config)
    path = folder / WEIGHTS_FILE
    try:
        found = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from None
    expected = {name: one.shape for name, one in model.named_parameters()}
    if {name: one.shape for name, one in found.items()} != expected:
        raise ConfigError(f"{path} has other tensors than config.json describes; write the folder with save_recurrent")
    if config.tie_word_embeddings:
        found["lm_head.weight"] = found["embed_tokens.weight"]
    model.load_state_dict(found, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    return model.eval()
