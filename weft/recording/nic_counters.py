"""Counters of this host's network interfaces, where the system lets everybody read them.

They count what all processes of the host send and receive, so they are an upper bound of what a run sends over them,
and errors on a link show here first. Messages inside a host go over the interface `lo`, or over none.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_WORD_BYTES = 4  # InfiniBand counts data in words
_INFINIBAND_ERRORS = ("symbol_error", "link_downed", "port_rcv_errors", "port_xmit_discards")


@dataclass(frozen=True)
class NicTraffic:
    """What an interface has sent and received, and how often it failed to."""

    sent_bytes: int
    received_bytes: int
    errors: int


def read_counters(root: Path = Path("/")) -> dict[str, NicTraffic]:
    """The counters of all interfaces by name; empty where they cannot be read."""
    found: dict[str, NicTraffic] = {}
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/net/dev").read_text().splitlines()[2:]:
            name, _, rest = line.partition(":")
            numbers = [int(word) for word in rest.split()]
            # Received: bytes, packets, errors, drops, 4 others; then the same of what was sent.
            found[name.strip()] = NicTraffic(
                numbers[8], numbers[0], numbers[2] + numbers[3] + numbers[10] + numbers[11]
            )
    for port in sorted((root / "sys/class/infiniband").glob("*/ports/*")):
        with suppress(OSError, ValueError):
            counters = port / "counters"
            sent, received = (int((counters / f"port_{way}_data").read_text()) for way in ("xmit", "rcv"))
            paths = [counters / name for name in _INFINIBAND_ERRORS]
            errors = sum(int(path.read_text()) for path in paths if path.exists())
            name = f"{port.parents[1].name} port {port.name}"
            found[name] = NicTraffic(_WORD_BYTES * sent, _WORD_BYTES * received, errors)
    return found


def since(before: Mapping[str, NicTraffic], now: Mapping[str, NicTraffic]) -> dict[str, NicTraffic]:
    """What was counted between two readings, of the interfaces that counted something."""
    found = {}
    for name, last in now.items():
        first = before.get(name)
        if first is not None and last != first:
            found[name] = NicTraffic(
                last.sent_bytes - first.sent_bytes,
                last.received_bytes - first.received_bytes,
                last.errors - first.errors,
            )
    return found
