"""Models by name."""

from __future__ import annotations

import pytest
import torch

from weft.errors import ConfigError
from weft.models import build
from weft.models.catalog import CATALOG, load_model, names


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("gpt-1.7b", 1.65),
        ("gpt-175b", 174.6),
        ("gpt-1t", 1008),
        ("frontier-1t", 1008),
        ("llama3-8b", 8.03),
        ("llama3-405b", 405.9),
        ("mpt-125m", 0.125),
        ("mpt-7b", 6.66),
        ("axonn-80b", 76.8),
        ("llama-6.7b", 6.74),
        ("bloom-176b", 176.2),
        ("glm-130b", 130),
        ("mixtral-8x7b", 46.7),
        ("deepseek-v3", 671.0),
    ],
)
@pytest.mark.full(2)
def test_a_model_has_the_parameters_of_its_name(name: str, billions: float) -> None:
    with torch.device("meta"):
        model = build(load_model(name))
    assert sum(one.numel() for one in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


def test_every_file_loads_and_names_its_source() -> None:
    assert len(names()) == 59
    for name in names():
        assert load_model(name).num_layers > 0
        assert (CATALOG / f"{name}.toml").read_text().splitlines()[0].startswith("# ")
        assert "https://" in (CATALOG / f"{name}.toml").read_text()


def test_an_unknown_name_gets_the_nearest_and_the_list() -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown model 'llama3-8'; did you mean 'llama3-8b'\?; known: amoebanet-d-18-208, .*, axonn-10b",
    ):
        load_model("llama3-8")
