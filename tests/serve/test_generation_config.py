"""Defaults of requests that a model's folder states in generation_config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from serve_for_tests import RepeatingEngine, serving

from weft.errors import DataError
from weft.serve.scheduling.request import Sampling
from weft.serve.text import stated_defaults

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "eos_token_id": 1}


def write(folder: Path, **table: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(table))
    return folder


def test_defaults_are_those_that_the_folder_states(tmp_path: Path) -> None:
    expected = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    assert stated_defaults(write(tmp_path, **QWEN)) == expected
    assert stated_defaults(write(tmp_path, do_sample=False, temperature=0.6)) == {"temperature": 0.0}
    assert stated_defaults(write(tmp_path, max_new_tokens=9, top_p=None)) == {"max_tokens": 9}
    assert stated_defaults(None) == stated_defaults(tmp_path / "nowhere") == {}


@pytest.mark.parametrize(
    "table", [{"temperature": -1}, {"top_k": "many"}, {"top_p": 2}, {"max_new_tokens": 0}, {"max_new_tokens": True}]
)
def test_defaults_that_no_request_may_have_are_refused(tmp_path: Path, table: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"generation_config\.json: .* correct it, or serve with --no-gen"):
        stated_defaults(write(tmp_path, **table))


def test_a_request_has_the_defaults_of_the_model_and_its_own_values() -> None:
    engine = RepeatingEngine()
    defaults = {"temperature": 0.7, "top_k": 20, "max_tokens": 3}
    with serving(engine, defaults=defaults) as served:
        for path, prompt in (
            ("/v1/completions", {"prompt": "ab"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "ab"}]}),
            ("/v1/responses", {"input": "ab"}),
        ):
            assert served.post(path, prompt).status_code == 200
            assert engine.requests[-1].sampling == Sampling(temperature=0.7, top_k=20)
            assert engine.requests[-1].max_tokens == 3
        own = {"temperature": 0, "top_k": -1, "top_p": 0.5, "max_tokens": 1}
        assert served.post("/v1/completions", {"prompt": "ab", **own}).status_code == 200
        assert engine.requests[-1].sampling == Sampling(temperature=0, top_k=0, top_p=0.5)
        assert engine.requests[-1].max_tokens == 1
