"""LoRA adapters chosen by each request: a mixed batch gives the tokens of the merged models; folders are of PEFT."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from serve_for_tests import serving
from serving_for_tests import (
    ADAPTED,
    GREEDY,
    likeliest,
    merged_model,
    save_adapter,
    serve_all,
    tiny_model,
    tokens_of,
)

from weft.errors import CheckpointError, ConfigError
from weft.models.adapter import CONFIG_FILE
from weft.serve.engine import Engine, EngineOptions
from weft.serve.model.adapters import TokenAdapters, merge_adapter
from weft.serve.scheduling.request import Request, RequestError


@pytest.mark.parametrize("name", ADAPTED)
def test_a_mixed_batch_gives_the_tokens_of_the_merged_models(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = {"a": save_adapter(tmp_path / "a", name, 1, 2), "b": save_adapter(tmp_path / "b", name, 2, 3)}
    models = {"": tiny_model(name)} | {one: merged_model(name, folder) for one, folder in folders.items()}
    prompts = [tuple(range(2, 13)), (5, 3)]
    requests = [
        Request(f"{adapter} {len(prompt)}", prompt, 8, GREEDY, adapter=adapter)
        for prompt in prompts
        for adapter in models
    ]
    expected = {one.name: likeliest(models[one.adapter], one.tokens, 8) for one in requests}
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)  # adapters matter
    sizes = {"block_size": 4, "num_blocks": 12, "token_budget": 9, "max_running": 5, "overlap": True}
    engine = Engine(tiny_model(name), EngineOptions(**sizes, adapters=folders))  # type: ignore[arg-type]
    assert tokens_of(serve_all(engine, requests, every=1)) == expected
    assert tokens_of(serve_all(engine, requests)) == expected  # prefixes of one adapter are not used for another
    assert engine.state().num_prefix_tokens > 0
    assert engine.state().num_free_blocks == 12
    embedded = engine.embed(prompts[1], "last")
    assert torch.equal(embedded, Engine(tiny_model(name), EngineOptions(num_blocks=4)).embed(prompts[1], "last"))

    def of_the_first(self: TokenAdapters, runs: object, device: object) -> None:
        self.of_tokens = torch.zeros(1, dtype=torch.int64)

    monkeypatch.setattr(TokenAdapters, "choose", of_the_first)
    alone = [one for one in requests if one.adapter == "b"][-1:]
    wrong = tokens_of(serve_all(engine, [replace(alone[0], name="wrong")]))["wrong"]
    assert wrong != expected[alone[0].name]  # the comparison sees another adapter


@pytest.mark.full  # peft takes two seconds to import
def test_merged_weights_are_those_of_peft(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from weft.models import save_folder

    folder = save_adapter(tmp_path / "a", "llama", 1, 2)
    save_folder(tmp_path / "model", tiny_model("llama"))  # type: ignore[arg-type]
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    theirs = PeftModel.from_pretrained(base, str(folder)).merge_and_unload().state_dict()
    for name, parameter in merged_model("llama", folder).named_parameters():
        torch.testing.assert_close(parameter.detach(), theirs[name])


def test_wrong_adapters_are_refused_in_words(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", "llama", 1, 2)
    engine = Engine(tiny_model("llama"), EngineOptions(num_blocks=8, adapters={"a": folder}))
    with pytest.raises(RequestError, match="there is no adapter 'b'"):
        engine.add(Request("x", (1,), 1, adapter="b"))
    with pytest.raises(ConfigError, match="no linear of a block is named"):
        Engine(tiny_model("gpt2"), EngineOptions(num_blocks=8, adapters={"a": folder}))
    with pytest.raises(CheckpointError, match=CONFIG_FILE):
        merge_adapter(tiny_model("llama"), tmp_path / "none")
    table = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**table, "r": 3}))
    with pytest.raises(CheckpointError, match="has shape"):
        merge_adapter(tiny_model("llama"), folder)
    (folder / CONFIG_FILE).write_text(json.dumps({**table, "use_dora": True}))
    with pytest.raises(ConfigError, match="use_dora = True is not supported"):
        merge_adapter(tiny_model("llama"), folder)


def test_a_request_names_its_adapter_over_http(tmp_path: Path) -> None:
    folder = save_adapter(tmp_path / "a", "llama", 1, 2)
    engine = Engine(tiny_model("llama"), EngineOptions(block_size=4, num_blocks=40, adapters={"fine": folder}))
    prompt = [5, 3, 8]
    models = {"tiny": tiny_model("llama"), "fine": merged_model("llama", folder)}
    with serving(engine, adapters=("fine",)) as served:
        assert [one["id"] for one in served.get("/v1/models").json()["data"]] == ["tiny", "fine"]
        for name, model in models.items():
            body = {"model": name, "prompt": prompt, "max_tokens": 5, "temperature": 0, "ignore_eos": True}
            found = served.post("/v1/completions", body).json()
            assert found["model"] == name
            assert found["choices"][0]["text"] == bytes(likeliest(model, prompt, 5)).decode()
        refused = served.post("/v1/completions", {"model": "other", "prompt": prompt})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "model_not_found")
        assert "this server has 'tiny', 'fine'" in refused.text
        assert served.post("/v1/embeddings", {"model": "fine", "input": prompt}).status_code == 404
