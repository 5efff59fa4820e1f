"""LSTM and GRU models on the GPU through the commands: proved, trained, and served with the text of a CPU."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from gpu_for_tests import ROOT, post, serving, succeeded, weft

EXAMPLE = ROOT / "examples" / "lstm.toml"
SMALL = ("data.sequence=16", "train.batch=8", "plan.micro_batch=2", "model.num_hidden_layers=2", "data.tokenizer=bytes")
PLANS = {
    "data": ("plan.data=2",),
    "shard": ("plan.data=1", "plan.shard.degree=2", "plan.shard.stage=3"),
    "pipe": ("plan.data=1", "plan.pipe=2"),
    "x": ("plan.data=1", "plan.tensor.x=2", "plan.memory.recompute=full"),
}


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_plan_equals_the_sequential_model(kind: str, plan: str) -> None:
    given = (*SMALL, f"model.architecture={kind}", *PLANS[plan])
    found = succeeded(weft("verify", EXAMPLE, *given, "--device", "cuda", "--json")).json
    assert found["passed"]
    assert found["device"] == "cuda"


@pytest.mark.parametrize("kind", ["lstm", "gru"])
def test_a_trained_model_is_served_with_the_text_of_a_cpu(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    given = (f"model.architecture={kind}", f"folder={run}", f"data.cache={tmp_path}/cache", "train.steps=40")
    succeeded(weft("train", EXAMPLE, *given))
    texts = [
        succeeded(weft("generate", run, *what, "--device", device, "--json")).json["text"]
        for what in [("--prompt", "def ", "--tokens", 40, "--temperature", 0)]
        for device in ("cpu", "cuda")
    ]
    with serving(run) as (process, url):
        asked = {"prompt": "def ", "max_tokens": 40, "temperature": 0}
        status, answer = post(f"{url}/v1/completions", asked)
        assert status == 200, answer
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    assert answer["choices"][0]["text"] in texts[1]  # type: ignore[index]
    assert texts[0] == texts[1]
