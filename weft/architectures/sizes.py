"""Keys of language models that several architectures have, and checks of sizes that all share."""

from __future__ import annotations

from typing import Annotated

from weft.errors import ConfigError

VocabSize = Annotated[int, "tokens of the vocabulary; in a run, by default those of the tokenizer"]
Tied = Annotated[bool, "does the head use the embedding's weights?"]

MAX_SIZE = 2**27  # the largest size of a model; the largest published are a thousandth of it
MAX_LAYERS = 2**14  # each is a module, also while a plan is checked
_LAYERS = ("num_hidden_layers", "n_layer", "layers", "depth")


def require_positive(config: object, *names: str) -> None:
    """Raise ConfigError for the first of the named fields that is not above zero, or larger than any model's."""
    for name in names:
        value, most = getattr(config, name), MAX_LAYERS if name in _LAYERS else MAX_SIZE
        if value <= 0:
            raise ConfigError(f"{name} = {value} must be positive; give a value above 0")
        if value > most:
            raise ConfigError(f"{name} = {value} is larger than that of any model; give at most {most}")


def divisors(number: int) -> str:
    """Returns the divisors of a number up to 256, as text for a message."""
    return ", ".join(str(divisor) for divisor in range(1, min(number, 256) + 1) if number % divisor == 0)
