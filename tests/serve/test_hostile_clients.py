"""A server among hostile clients: it answers others as before, stays up, and ends when it is told to.

`WEFT_HOSTILE_REQUESTS` is the number of hostile requests in soak, which also judges seconds and memory;
`WEFT_HOSTILE_SEED` chooses others, so that several machines or processes share a long soak.
"""

from __future__ import annotations

import os
import random
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from hostile_for_tests import COMPLETIONS, ENDLESS, HostileClient
from serve_for_tests import LIMIT_SECONDS, NO_CERTIFICATES, TEMPLATE
from served_ranks_for_tests import server_process
from serving_for_tests import SIZES

from weft.models import DecoderConfig, build, initialise, save_folder

pytestmark = pytest.mark.processes
ROOT = Path(__file__).parents[2]
NUM_CLIENTS = 4
ALLOWED = {0, 200, 400, 404, 408, 413, 429, 503}  # 0: the server closed the connection
HONEST = {"prompt": "abc", "max_tokens": 8, "temperature": 0}
HEALTH_SECONDS, HONEST_SECONDS, END_SECONDS = 1.0, 5.0, 10.0  # judged in soak
MORE_BYTES = 128 << 20  # that the second half of the requests may add


@dataclass
class Server:
    process: subprocess.Popen[bytes]
    url: str

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.url.rpartition(":")[2])

    @property
    def memory_bytes(self) -> int:
        pages = Path(f"/proc/{self.process.pid}/statm").read_text().split()[1]
        return int(pages) * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    model = build(DecoderConfig(**{**SIZES, "vocab_size": 257, "max_position_embeddings": 256}))  # type: ignore[arg-type]
    initialise(model, 0)
    save_folder(folder / "model", model)  # type: ignore[arg-type]
    (folder / "chat.jinja").write_text(TEMPLATE)
    options = ("--tokenizer", "bytes", "--chat-template", str(folder / "chat.jinja"), "--no-warm-up")
    options += ("--drain-seconds", "1", "--request-seconds", "60")
    with server_process(folder / "model", *options, stderr=subprocess.DEVNULL) as (process, about):
        yield Server(process, about["url"])


class Watch:
    """Asks for the server's health, and for one answer, again and again."""

    def __init__(self, server: Server) -> None:
        self._client = httpx.Client(base_url=server.url, timeout=LIMIT_SECONDS, **NO_CERTIFICATES)
        self._expected = self._answer()
        self.health_seconds, self.answer_seconds = [0.0], [0.0]
        self.num_wrong = 0

    def _answer(self) -> str:
        found = self._client.post(COMPLETIONS, json=HONEST)
        return found.json()["choices"][0]["text"] if found.status_code == 200 else f"status {found.status_code}"

    def look(self) -> None:
        began = time.monotonic()
        self.num_wrong += self._client.get("/health").status_code != 200
        middle = time.monotonic()
        self.num_wrong += self._answer() != self._expected
        self.health_seconds.append(middle - began)
        self.answer_seconds.append(time.monotonic() - middle)


def attack(server: Server, number: int, seed: int) -> tuple[Watch, dict[int, int]]:
    """Send hostile requests from several threads and watch the server meanwhile. Returns the counts of statuses."""
    clients = [HostileClient(server.address, seed * NUM_CLIENTS + index) for index in range(NUM_CLIENTS)]

    def run(client: HostileClient) -> None:
        for _ in range(number // NUM_CLIENTS):
            client.send_one()

    watch = Watch(server)
    threads = [threading.Thread(target=run, args=(client,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        watch.look()
        time.sleep(0.02)
    statuses: dict[int, int] = {}
    for client in clients:
        client.close()
        for status, count in client.statuses.items():
            statuses[status] = statuses.get(status, 0) + count
    return watch, statuses


def test_others_are_answered_as_before_and_nothing_is_an_error_of_the_server(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        watch, statuses = attack(server, 60, seed=1)
        assert watch.num_wrong == 0
        assert set(statuses) <= ALLOWED, statuses
        assert {200, 400} <= set(statuses)
        hold_schemas(server, 4)
        server.process.terminate()  # while schemas compile that never end
        server.process.wait(LIMIT_SECONDS)


def hold_schemas(server: Server, number: int) -> None:
    """Let the server compile schemas that never end."""
    for index in range(number):
        schema = {"allOf": [*ENDLESS["allOf"], {"maxLength": 10**6 + index}]}
        body = {"prompt": "x", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        threading.Thread(target=_post, args=(server.url + COMPLETIONS, body), daemon=True).start()
    time.sleep(0.5)


def _post(url: str, body: object) -> None:
    with suppress(httpx.HTTPError):  # the server ends
        httpx.post(url, json=body, timeout=LIMIT_SECONDS, **NO_CERTIFICATES)


@pytest.mark.soak
def test_many_hostile_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    number = int(os.environ.get("WEFT_HOSTILE_REQUESTS", "20000"))
    first_seed = int(os.environ.get("WEFT_HOSTILE_SEED", "2"))
    with serving(tmp_path) as server:
        memory = [server.memory_bytes]
        for half in range(2):
            watch, statuses = attack(server, number // 2, seed=first_seed + half)
            memory.append(server.memory_bytes)
            with capsys.disabled():
                found = f"health {max(watch.health_seconds):.2f} s, answers {max(watch.answer_seconds):.2f} s"
                print(f"\n{number // 2} requests: {found}, MiB {[one >> 20 for one in memory]}, {statuses}")
            assert watch.num_wrong == 0
            assert set(statuses) <= ALLOWED, statuses
            assert max(watch.health_seconds) < HEALTH_SECONDS
            assert max(watch.answer_seconds) < HONEST_SECONDS
        assert memory[2] - memory[1] < MORE_BYTES


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(5))
def test_the_signal_ends_the_server_at_any_moment(tmp_path: Path, seed: int) -> None:
    with serving(tmp_path) as server:
        hold_schemas(server, 4)
        attacked = threading.Thread(target=_attack_until_it_ends, args=(server, seed), daemon=True)
        attacked.start()
        time.sleep(random.Random(seed).uniform(0, 4))
        server.process.terminate()
        server.process.wait(END_SECONDS)


def _attack_until_it_ends(server: Server, seed: int) -> None:
    client = HostileClient(server.address, seed)
    with suppress(OSError):  # the server ends
        while server.process.poll() is None:
            client.send_one()
    client.close()
