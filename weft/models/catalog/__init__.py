"""A catalog of models: configs that papers and model cards publish, each file with its source.

A file has the keys of a `[model]` table; `load_model("llama3-8b")` returns the config.
"""

from __future__ import annotations

from pathlib import Path

from weft.architectures import ModelConfig
from weft.errors import ConfigError
from weft.models import config_from_table
from weft.schema import nearest, read_toml

CATALOG = Path(__file__).parent


def names() -> list[str]:
    """Returns the names of the models in the catalog, sorted."""
    return sorted(path.stem for path in CATALOG.glob("*.toml"))


def load_model(name: str) -> ModelConfig:
    """Returns the config of a model of the catalog."""
    known = names()
    if name not in known:
        close = nearest(name, known)
        listed = f"; known: {', '.join(known)}"
        raise ConfigError(f"unknown model '{name}'{close if 'did you mean' in close else ''}{listed}")
    return config_from_table(read_toml(CATALOG / f"{name}.toml"), path=name)
