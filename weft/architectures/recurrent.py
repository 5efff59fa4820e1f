"""The table `[model]` of recurrent language models: LSTM and GRU."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Literal, get_args

from weft.architectures.sizes import Tied, VocabSize, require_positive
from weft.errors import ConfigError

HEAD_DEVIATION = 0.02
RecurrentArchitecture = Literal["lstm", "gru"]


@dataclass(frozen=True)
class RecurrentConfig:
    """The config of a recurrent model."""

    architecture: Annotated[RecurrentArchitecture, "LSTM or GRU"] = "lstm"
    vocab_size: VocabSize = 32000
    hidden_size: Annotated[int, "the width of the embedding, of each layer and of its state"] = 512
    num_hidden_layers: Annotated[int, "the number of layers"] = 2
    max_position_embeddings: Annotated[int, "the most tokens of a text that are served from an exported folder"] = 2048
    tie_word_embeddings: Tied = False

    embedding_name: ClassVar[str] = "embed_tokens.weight"
    is_compiled: ClassVar[bool] = False  # torch.compile would unroll a sequence token by token

    def __post_init__(self) -> None:
        if self.architecture not in get_args(RecurrentArchitecture):
            raise ConfigError(f"architecture = {self.architecture!r} is not recurrent; use lstm or gru")
        require_positive(self, "vocab_size", "hidden_size", "num_hidden_layers", "max_position_embeddings")

    @property
    def num_layers(self) -> int:
        return self.num_hidden_layers

    @property
    def context_length(self) -> int:
        return self.max_position_embeddings

    @property
    def num_gates(self) -> int:
        """How many gates a layer computes, each as wide as its state."""
        return 4 if self.architecture == "lstm" else 3

    def initial_deviation(self, name: str, num_inputs: int) -> float:
        """The standard deviation of a weight's initial values: that of torch's own layers. A tied embedding is also the
        head, whose values are small.
        """
        if ".weight_" in name:
            return math.sqrt(1 / (3 * num_inputs))
        return 1.0 if name == self.embedding_name and not self.tie_word_embeddings else HEAD_DEVIATION

    def with_layers(self, num_layers: int) -> RecurrentConfig:
        """The same model with another number of layers."""
        return replace(self, num_hidden_layers=num_layers)

    def shrunk(self, num_layers: int = 2) -> RecurrentConfig:
        """A tiny config of the same structure, for a quick verification in float64."""
        return replace(
            self,
            vocab_size=min(self.vocab_size, 61),
            hidden_size=min(self.hidden_size, 16),
            num_hidden_layers=min(self.num_hidden_layers, num_layers),
            max_position_embeddings=min(self.max_position_embeddings, 64),
        )
