"""The sizes of recurrent language models (LSTM and GRU), which are served but not trained by a run file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from weft.architectures.sizes import require_positive
from weft.errors import ConfigError

RecurrentKind = Literal["lstm", "gru"]


@dataclass(frozen=True)
class RecurrentConfig:
    """The config of a recurrent model. `max_position_embeddings` is the most tokens that are served of a text."""

    architecture: RecurrentKind = "lstm"
    vocab_size: int = 32000
    hidden_size: int = 512
    num_hidden_layers: int = 2
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.architecture not in get_args(RecurrentKind):
            raise ConfigError(f"architecture = {self.architecture!r} is not recurrent; use lstm or gru")
        require_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")
