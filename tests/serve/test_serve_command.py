"""`weft serve` as a process: a run that trains on is followed, SIGTERM lets requests finish, mistakes are one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest
from commands_for_tests import Weft
from runs_for_tests import DEEP, make_run, train_on_ranks, write_run_file
from serve_for_tests import LIMIT_SECONDS, wait_for
from served_ranks_for_tests import ranks_of, server_process

from weft.architectures import RecurrentConfig
from weft.models import RecurrentModel, save_folder

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
Running = tuple[subprocess.Popen[bytes], str]  # a server, and its URL


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """The file of a run that has its first checkpoint, at step 3."""
    path = write_run_file(tmp_path)
    train_on_ranks(make_run(path, "run", "train.steps=3"))
    return path


TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
STARTS = {  # what is put before `-m weft serve`, and the plan
    "one rank": ((), ()),
    "local ranks": ((), ("plan.tensor.x=2",)),
    "torchrun": (TORCHRUN, ("plan.pipe=2",)),
}
STREAMING = {  # plans with weights in host memory
    "replicas": ("plan.data=2", "--resident-blocks", "1"),
    "slices": ("plan.tensor.x=2",),
}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.soak] * (name != "one rank")) for name in STARTS])
def server(request: pytest.FixtureRequest, run_file: Path) -> Iterator[Running]:
    """The process of a server, and its URL."""
    with started(run_file, request.param) as given:
        yield given


@contextmanager
def started(run_file: Path, name: str) -> Iterator[Running]:
    launcher, plan = STARTS[name]
    with serving(run_file, launcher, (*plan, "--follow", "--context", "2048")) as given:
        yield given


@contextmanager
def serving(run_file: Path, launcher: tuple[str, ...], more: tuple[str, ...]) -> Iterator[Running]:
    with server_process(run_file.parent / "run", *more, program=(*launcher, "-m", "weft")) as (process, about):
        assert (about["model"], about["weights"], about["device"]) == ("run", "step-00000003", "cpu")
        yield process, about["url"]


def test_a_run_is_followed_and_requests_survive_newer_weights_and_the_end(run_file: Path, server: Running) -> None:
    process, url = server
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS)

    def logprobs() -> list[float | None]:
        found = client.completions.create(model="run", prompt="abc def ", max_tokens=8, temperature=0, logprobs=1)
        assert found.choices[0].logprobs is not None
        assert found.choices[0].logprobs.token_logprobs is not None
        return found.choices[0].logprobs.token_logprobs

    before = logprobs()
    assert logprobs() == before
    texts: list[str] = []
    stop = threading.Event()

    def ask_on() -> None:
        """Requests one after another, so that one is under way whenever the weights change."""
        while not stop.is_set():
            found = client.completions.create(
                model="run", prompt="abc", max_tokens=200, seed=1, extra_body={"ignore_eos": True}
            )
            assert found.usage is not None
            texts.append(f"{found.choices[0].finish_reason} {found.usage.completion_tokens}")

    asking = threading.Thread(target=ask_on)
    asking.start()
    train_on_ranks(make_run(run_file, "run", "train.steps=6"))
    wait_for(lambda: httpx.get(f"{url}/health").json()["weights"] == "step-00000006")
    stop.set()
    asking.join(LIMIT_SECONDS)
    assert set(texts) == {"length 200"}
    assert logprobs() != before

    stream = client.completions.create(
        model="run", prompt="abc", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = iter(stream)
    num_characters = len(next(chunks).choices[0].text)
    process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
    with pytest.raises(openai.InternalServerError, match="the server stops and takes no more requests"):
        client.completions.create(model="run", prompt="x")
    last = None
    for chunk in chunks:
        num_characters, last = num_characters + len(chunk.choices[0].text), chunk.choices[0].finish_reason
    assert last == "length"
    assert num_characters > 250  # 1000 bytes
    assert process.wait(LIMIT_SECONDS) == (1 if "torch.distributed.run" in process.args else 0)  # torchrun's own


def test_a_chat_without_max_tokens_has_what_the_cache_holds(run_file: Path, tmp_path: Path) -> None:
    (tmp_path / "template").write_text("{% for one in messages %}{{ one.content }}{% endfor %}")
    more = ("--context", "2048", "--cache-blocks", "8", "--chat-template", str(tmp_path / "template"))
    with serving(run_file, (), more) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS)
        assert client.models.retrieve("run").context_length == 128  # type: ignore[attr-defined]
        messages = [{"role": "user", "content": "abc"}]
        found = client.chat.completions.create(model="run", messages=messages, extra_body={"ignore_eos": True})  # type: ignore[call-overload]
        assert (found.usage.total_tokens, found.choices[0].finish_reason) == (128, "length")


@pytest.mark.soak
@pytest.mark.parametrize("index", [0, -1])
def test_when_a_rank_is_killed_requests_get_503_until_the_model_is_back(run_file: Path, index: int) -> None:
    body = {"prompt": "abc def ", "max_tokens": 8, "temperature": 0}
    with started(run_file, "local ranks") as (process, url):

        def ask() -> httpx.Response:
            return httpx.post(f"{url}/v1/completions", json=body, timeout=LIMIT_SECONDS)

        right = ask().json()["choices"]
        ranks = ranks_of(process.pid)
        os.kill(ranks[index], signal.SIGKILL)
        seen: list[httpx.Response] = []

        def is_back() -> bool:
            with suppress(httpx.RemoteProtocolError, httpx.ReadError):  # rank 0 died while it held the connection
                seen.append(ask())
            return len(seen) > 1 and seen[-1].status_code == 200 and seen[-2].status_code == 503

        wait_for(is_back)
        assert {one.status_code for one in seen} <= {200, 503}
        assert all(one.json()["error"]["message"] for one in seen if one.status_code == 503)
        assert seen[-1].json()["choices"] == right
        assert not set(ranks) & set(ranks_of(process.pid))  # all were started again
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_SECONDS) == 0


@pytest.mark.parametrize("name", ["replicas", pytest.param("slices", marks=pytest.mark.soak)])
def test_ranks_with_weights_in_host_memory_give_the_same_text(weft: Weft, tmp_path: Path, name: str) -> None:
    run_file = write_run_file(tmp_path, DEEP)
    train_on_ranks(make_run(run_file, "run", "train.steps=3"))
    prompts = ["abc def ", "a", "de"]
    folder = str(tmp_path / "run")
    asked = ("--tokens", "12", "--temperature", "0", "--device", "cpu", "--json")
    expected = [json.loads(weft("generate", folder, "--prompt", one, *asked).out)["text"] for one in prompts]
    with serving(run_file, (), (*STREAMING[name], "--stream-weights", "1")) as (_, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=LIMIT_SECONDS)
        found = client.completions.create(model="run", prompt=prompts, max_tokens=12, temperature=0)
        assert [choice.text for choice in found.choices] == expected
        assert client.embeddings.create(model="run", input="abc").data  # by one replica, while others take part


def test_mistakes_are_one_line(weft: Weft, run_file: Path, tmp_path: Path) -> None:
    run = run_file.parent / "run"
    lstm = tmp_path / "lstm"
    save_folder(lstm, RecurrentModel(RecurrentConfig("lstm", 61, 12)))
    for arguments, words in (
        ([tmp_path / "none"], "none"),
        ([run, "--sums", "nonsense"], "--sums nonsense is unknown; give library"),
        ([run, "--device", "cpu", "--share-gpus"], "--share-gpus is for --device cuda, and the device is the CPU"),
        ([lstm, "plan.data=2"], "a recurrent model is served on one rank"),
        ([lstm, "--merge-adapter", tmp_path], "a recurrent model is served on one rank"),
        ([run, "--host", "0.0.0.0"], "--host 0.0.0.0 is reached from other machines; give --api-key"),
        ([run, "--api-key", "a b"], "--api-key must be printable ASCII"),
        ([run, "--device", "tpu"], "--device tpu is not one of auto, cpu, cuda"),
        ([run / "checkpoints" / "step-00000003", "--follow"], "--follow needs a run folder with a checkpoint"),
        ([run, "--host", "203.0.113.1", "--api-key", "x"], "cannot listen on 203.0.113.1:8000"),
        ([run, "--port", "0", "--adapter", "fine"], "--adapter 'fine' must be name=FOLDER"),
        ([run, "--port", "0", "--adapter", f"a={tmp_path}"], "adapter_config.json does not exist"),
        ([run, "--port", "0", "--merge-adapter", tmp_path], "adapter_config.json does not exist"),
        ([run, "--port", "0", "--chat-template", tmp_path / "none"], "cannot read the chat template"),
        ([run, "plan.data=2", "plan.pipe=2", "--stream-weights", "1"], "are in different steps; use one of the two"),
        (
            [run, "plan.data=2", "--follow", "--weights", "int4", "--calibration", run_file],
            "--follow with --calibration would correct the rounding of newer weights while requests wait",
        ),
        ([run, "plan.data=2", "--follow", "--stream-weights", "1"], "--follow replaces weights, which --stream-w"),
    ):
        left = weft("serve", *arguments)
        assert left.status == 2, left.err
        assert words in left.err
        mistake = [line for line in left.err.splitlines() if not line.startswith("weft: loading ")]
        assert len(mistake) == 1, left.err


def test_a_server_says_what_it_loads_before_torch_is_imported(tmp_path: Path) -> None:
    """Seconds of silence looked as if it hung. Standard output is for `--json`."""
    program = """
import os, sys
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os._exit(7)
sys.meta_path.insert(0, Stop())
from weft.commands.main import main
main()
"""
    command = [sys.executable, "-c", program, "serve", str(tmp_path), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert (done.returncode, done.stdout, done.stderr) == (7, "", f"weft: loading {tmp_path}\n")
