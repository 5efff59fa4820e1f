"""Two hosts: network namespaces of one machine, joined by a cable. Making them needs root and `ip`.

Each namespace has its own loopback and its own address, so that what wrongly binds or names loopback cannot work
here, as it could not on two machines.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator

import pytest

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29511


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """The names of two namespaces, each with one end of a cable, named as its namespace."""
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the `ip` command (iproute2)")
    names = [f"weft{os.getpid() % 1000000}{end}" for end in "ab"]  # an interface's name has 15 characters at most
    try:
        try:
            for name in names:
                ip("netns", "add", name)
            ip("link", "add", names[0], "netns", names[0], "type", "veth", "peer", "name", names[1], "netns", names[1])
            for name, address in zip(names, ADDRESSES, strict=True):
                ip("-n", name, "address", "add", f"{address}/24", "dev", name)
                ip("-n", name, "link", "set", "lo", "up")
                ip("-n", name, "link", "set", name, "up")
        except subprocess.CalledProcessError as error:
            if "not permitted" in error.stderr or "denied" in error.stderr:
                pytest.skip(f"network namespaces are not allowed here: {error.stderr.strip()}")
            raise
        yield names
    finally:
        for name in names:
            with contextlib.suppress(subprocess.CalledProcessError):
                ip("netns", "delete", name)  # takes its end of the cable along


def end_all(host: str) -> None:
    """Kill what still runs in a namespace: torchrun's ranks lead sessions of their own and may outlive it."""
    pids = subprocess.run(["ip", "netns", "pids", host], capture_output=True, text=True).stdout.split()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
