"""Prints texts that a model wrote."""

from __future__ import annotations

import sys
import unicodedata


def print_text(text: str) -> None:
    """Print a text that a model wrote. On a terminal, control characters are replaced: they could change its state."""
    if sys.stdout.isatty():
        text = "".join("\N{REPLACEMENT CHARACTER}" if _is_control(letter) else letter for letter in text)
    print(text)


def _is_control(letter: str) -> bool:
    return letter not in "\n\t" and unicodedata.category(letter) == "Cc"
