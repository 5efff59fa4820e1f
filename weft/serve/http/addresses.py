"""The address that a server listens on."""

from __future__ import annotations

import socket

from weft.errors import ConfigError

MAX_CONNECTIONS = 2048


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free one. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    found = socket.socket(family, socket.SOCK_STREAM)
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind((host, port))
        found.listen(MAX_CONNECTIONS)
    except OSError as error:
        found.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}); give another --port") from None
    return found


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")
