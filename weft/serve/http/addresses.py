"""The address that a server listens on."""

from __future__ import annotations

import ipaddress
import socket

from weft.errors import ConfigError

MAX_CONNECTIONS = 2048
LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def listen(host: str, port: int) -> socket.socket:
    """Returns a socket that listens; port 0 takes a free one. Raises ConfigError if the address cannot be used."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(MAX_CONNECTIONS)
    except OSError as error:
        sock.close()
        raise ConfigError(f"cannot listen on {host}:{port} ({error.strerror or error}); give another --port") from None
    return sock


def is_loopback(host: str) -> bool:
    """Is an address reached from this machine alone? Of names, localhost is; others may lead anywhere."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def url_name(host: str) -> str:
    """Returns an address as URLs have it."""
    return f"[{host}]" if ":" in host else host


def names_of(host: str) -> tuple[str, ...] | None:
    """Returns the names under which a server on an address answers: those of this machine, or None for any name."""
    return tuple(dict.fromkeys((*LOOPBACK_NAMES, url_name(host).lower()))) if is_loopback(host) else None
