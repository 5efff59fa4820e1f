"""Serving on the GPU: an engine there answers what it answers on a CPU, and the commands serve a run."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from gpu_for_tests import post, serving, succeeded, weft, write_run

from weft.launch.fork_server import ForkServer

pytestmark = pytest.mark.xdist_group("serving")


@pytest.mark.parametrize(
    "options",
    [
        {"architecture": "llama"},
        {"architecture": "qwen3"},
        {"architecture": "mixtral"},
        {"architecture": "llama", "weights": "fp8"},
        {"architecture": "llama", "weights": "int8"},
        {"architecture": "llama", "weights": "int4"},
        {"architecture": "mixtral", "weights": "fp8"},
        {"architecture": "llama", "cache": "int4"},
        {"architecture": "llama", "cache": "int4-32"},
        {"architecture": "llama", "cache": "int4-128"},
        {"architecture": "llama", "speculate": "ngram"},
        {"architecture": "llama", "speculate": "layers=1"},
        {"architecture": "lstm"},
        {"architecture": "gru"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_an_engine_on_the_gpu_answers_as_on_a_cpu(options: dict[str, str], fork_server: ForkServer) -> None:
    here, there = (fork_server.call("tokens", device=device, **options) for device in ("cuda", "cpu"))
    assert here == there
    assert len({tuple(tokens) for tokens in here.values()}) == len(here)  # requests differ in their answers


@pytest.mark.parametrize("way", ["plain", "int4", "fp8", "cache int4", "ngram"])
def test_after_the_warm_up_nothing_is_compiled(way: str, fork_server: ForkServer) -> None:
    assert not fork_server.call("compiled_while_serving", way=way, warms_up=True)


def test_without_a_warm_up_requests_wait_for_the_compiler(fork_server: ForkServer) -> None:
    """The control. Kernels on disk count, too: a process loads them."""
    assert fork_server.call("compiled_while_serving", way="plain", warms_up=False)


@pytest.mark.parametrize("cache", [None, "int4"])
def test_a_text_is_embedded_as_on_a_cpu(cache: str | None, fork_server: ForkServer) -> None:
    here, there = (fork_server.call("embedded", device=device, cache=cache) for device in ("cuda", "cpu"))
    assert here == pytest.approx(there, abs=5e-3)


@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen3", "mixtral", "mixtral int4", "mixtral fp8"])
def test_graphs_of_kernels_choose_the_likeliest_tokens(architecture: str, fork_server: ForkServer) -> None:
    architecture, _, weights = architecture.partition(" ")
    found = fork_server.call("lost_logits", architecture=architecture, weights=weights or None)
    assert found["graphs"] > 1
    # By rounding, a router of Mixtral sends a few tokens to another expert: 3 in 100, also on a CPU.
    lost = found["mostly lost" if architecture == "mixtral" else "lost"]
    assert lost < 0.25 < 1 < found["one place off"], found


def test_ranks_that_hold_the_pages_of_a_request_together_answer_as_one(fork_server: ForkServer) -> None:
    found = [fork_server.call("served_on_ranks", table={"context": n}, ways=[[0, "library"]]) for n in (2, 1)]
    together, alone = (one[0][0][0] for one in found)
    assert together["tokens"] == alone["tokens"]
    assert together["embedding"] == pytest.approx(alone["embedding"], abs=1e-4)
    assert together["prefix"] == alone["prefix"]


@pytest.mark.parametrize("architecture", ["llama", "mistral"])
def test_attention_to_pages_of_two_ranks_is_as_exact_as_of_one(architecture: str, fork_server: ForkServer) -> None:
    """In bf16, against float32; the control drops what the second rank gives."""
    first, second = fork_server.call("split_logits", architecture=architecture)
    together, alone, dropped, largest, logits = first
    assert 0 < together < 2 * alone < 0.6 * largest < dropped
    assert logits == second[4]  # the same bits


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    succeeded(weft("train", write_run(folder), "--no-verify", "plan.micro_batch=8"))
    return folder / "text"


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--weights", "fp8"],
        ["--weights", "int4"],
        ["--cache", "int4"],
        ["--speculate", "ngram"],
        ["--speculate", "layers=1"],
        ["--stream-weights", "1", "--resident-blocks", "1"],
    ],
)
def test_weft_generate(options: list[str], run: Path) -> None:
    found = succeeded(weft("generate", run, "--tokens", 60, "--temperature", 0, "--json", *options)).json
    assert found["text"]


def test_weft_calibrate_and_loki(run: Path) -> None:
    axes = run.parent / "axes.safetensors"
    text = run.parent / "text.txt"
    text.write_text("def main():\n    return 0\n" * 400)
    succeeded(weft("calibrate", run, "--data", text, "--out", axes, "--dense-below", 8))
    for more in (["--cache", f"loki={axes}"], ["--cache", f"loki={axes}", "--speculate", "ngram"]):
        assert succeeded(weft("generate", run, "--tokens", 60, "--json", *more)).json["text"]


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    with serving(run) as given:
        yield given


def test_weft_serve(server: tuple[subprocess.Popen[str], str]) -> None:
    """Answers repeat, bad requests are refused in words, and SIGTERM ends it."""
    process, url = server
    asked = {"prompt": "def main", "max_tokens": 30, "temperature": 0.7, "seed": 3}
    answers = [post(f"{url}/v1/completions", asked) for _ in range(2)]
    assert [status for status, _ in answers] == [200, 200]
    texts = [answer["choices"][0]["text"] for _, answer in answers]  # type: ignore[index]
    assert texts[0] == texts[1]
    status, refused = post(f"{url}/v1/completions", {**asked, "max_tokens": -1})
    assert status == 400, refused
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0


@pytest.mark.parametrize(
    "more", [["plan.data=2"], ["plan.data=2", "--stream-weights", "1"], ["plan.pipe=2", "--stream-weights", "1"]]
)
def test_weft_serve_on_ranks_that_share_the_gpu(more: list[str], run: Path) -> None:
    """By replicas with CUDA graphs, replicas that read weights together, and stages that have their own: the text of
    one rank.
    """
    asked = {"prompt": ["def main", "import "], "max_tokens": 30, "temperature": 0}
    texts = []
    for options in ((), (*more, "--share-gpus")):
        with serving(run, *options, "--cache-blocks", "200") as (process, url):
            status, answer = post(f"{url}/v1/completions", asked)
            assert status == 200, answer
            texts.append([choice["text"] for choice in answer["choices"]])  # type: ignore[attr-defined]
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) == 0
    assert texts[0] == texts[1]
