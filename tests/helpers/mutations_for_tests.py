"""Ways to spoil a checkpoint's files: bytes, JSON text, JSON values, headers of shards. All from one random stream."""

from __future__ import annotations

import json
import random
import re
import struct
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

HUGE = [2**31, 2**32, 2**53 + 1, 2**60, 2**63 - 1, 2**63, 2**64, 10**30, 10**400, 10**4000, -1, -(2**63), 0, 1]
PATHS = [
    "../rank-00001.safetensors", "/etc/passwd", "/dev/zero", "..", ".", "", "rank-00001.safetensors/", "a\0b",
    "rank-00001.safetensors\n", "rank-00000.safetensors/../../x", "rank-０0001.safetensors", "~/x", "C:\\x",
    "rank-99999.safetensors", "manifest.json", "file:///etc/passwd", "rank-00001.safetensors\0.txt",
]  # fmt: skip
TEXTS = [
    "\ud800",
    "\u202e",
    "\x1b[2J",
    "𝔴",
    "e\u0301",
    "é" * 3000,
    "\x00",
    "__metadata__",
    "F4",
    "F8_E8M0",
    "F32",
    "BOOL",
]
WRONG: list[Any] = [None, True, False, 1.5, -0.0, 1e308, [], {}, [[]], [None], {"a": 1}, "", [0, 0], "0", ["x"] * 50]
TOKENS = [
    b"NaN", b"Infinity", b"-Infinity", b"1e999", b"-0", b"1E400", b"0x10", b"00", b"null", b"true", b'"\\ud800"',
    b'"\\u0000"', b"[" * 5000, b"{" * 5000, b'{"a":' * 3000, b"]", b"}", b'"', b",", b":", b"\\", b"\xff\xfe",
    b"\xed\xa0\x80", b"/**/", b"9" * 5000, b"-" + b"9" * 400, b"\xef\xbb\xbf", b"\0", b'"a":1,', b" " * 1000,
    b"[" * 300 + b"]" * 300,
]  # fmt: skip
Mutator = Callable[[random.Random, bytes], bytes]


def spoil_bytes(draw: random.Random, raw: bytes) -> bytes:
    """Flip, cut, insert, repeat, drop or swap some bytes."""
    data, at = bytearray(raw), draw.randrange(len(raw) + 1)
    other, length = draw.randrange(len(raw) + 1), draw.choice([1, 1, 2, 8, 64])
    match draw.randrange(6):
        case 0:
            for _ in range(draw.choice([1, 1, 2, 8])):
                data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        case 1:
            del data[at:]
        case 2:
            data[at:at] = draw.randbytes(length)
        case 3:
            data[at:at] = data[other : other + length]
        case 4:
            del data[at : at + length]
        case _:
            data[at : at + length], data[other : other + length] = (
                data[other : other + length],
                data[at : at + length],
            )
    return bytes(data)


def spoil_text(draw: random.Random, raw: bytes) -> bytes:
    """Put a word that is no JSON, or no good one, into JSON: in a number's place, a value's place, or anywhere."""
    where = draw.choice([rb"-?[0-9]+", rb'"[^"]*"', rb"[\[{:,\]}]", rb"[\[{,]"])
    found = list(re.finditer(where, raw))
    if not found:
        return spoil_bytes(draw, raw)
    spot = draw.choice(found)
    token = draw.choice(TOKENS) if draw.randrange(3) else str(draw.choice(HUGE)).encode()
    begin = spot.start() if draw.randrange(2) else spot.end()
    return raw[:begin] + token + raw[spot.end() :]


def spoil_values(draw: random.Random, raw: bytes) -> bytes:
    """Parse, change one to three values, write: swaps of fields, wrong types, huge numbers, paths, names."""
    content = json.loads(raw)
    for number in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(all_places(content))
        if not places:
            break
        container, key = draw.choice(places)
        value = container[key]
        match draw.randrange(9):
            case 0:
                other, its_key = draw.choice(places)
                container[key], other[its_key] = json.loads(json.dumps([other[its_key], value]))
            case 1:
                container[key] = deepcopy(draw.choice(WRONG))  # it may be changed next
            case 2:
                container[key] = draw.choice(HUGE)
            case 3 if isinstance(value, int):
                container[key] = value + draw.choice([-1, 1, 4, -4, 2**32, 2**63])
            case 4:
                container[key] = draw.choice(PATHS + TEXTS)
            case 5:
                del container[key]
            case 6 if isinstance(container, dict):
                container[draw.choice(PATHS + TEXTS)] = container.pop(key)
            case 7 if isinstance(container, list):
                container.extend([value] * draw.choice([1, 2, 1 if number else 5000]))  # many times once
            case _:
                container[key] = nested(draw.choice([10, 100, 250]), value)
    text = json.dumps(content, separators=(",", ":"))
    if draw.randrange(20) == 0:  # a key twice, with the same or another value
        pairs = list(re.finditer(r'"[a-z_]+":("[^"]*"|[0-9]+)', text))
        if pairs:
            pair = draw.choice(pairs)
            text = text[: pair.start()] + pair[0] + "," + text[pair.start() :]
    return text.encode()


def nested(depth: int, value: Any) -> Any:
    """A value deep inside of lists."""
    for _ in range(depth):
        value = [value]
    return value


def all_places(value: Any, depth: int = 10) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in the upper levels of a JSON document."""
    for key in list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        yield value, key
        if depth:
            yield from all_places(value[key], depth - 1)


MUTATORS: tuple[Mutator, ...] = (spoil_bytes, spoil_text, spoil_values, spoil_values)


def spoil_shard(draw: random.Random, raw: bytes) -> bytes:
    """A safetensors file with another header length, another header (its length set right) or other bytes."""
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = raw[8 : 8 + length], raw[8 + length :]
    match draw.randrange(6):
        case 0:
            lengths = [0, 1, length - 1, length + 1, len(raw), 2**27, 2**31, 2**60, 2**63, 2**64 - 1]
            return struct.pack("<Q", draw.choice(lengths)) + raw[8:]
        case 1:
            return spoil_bytes(draw, raw)
        case _:
            header = draw.choice(MUTATORS)(draw, header)
            return struct.pack("<Q", len(header)) + header + data
