"""Checks of sizes that all architectures share."""

from __future__ import annotations

from weft.errors import ConfigError


def require_positive(config: object, *names: str) -> None:
    """Raise ConfigError for the first of the named fields that is not above zero."""
    for name in names:
        if getattr(config, name) <= 0:
            raise ConfigError(f"{name} = {getattr(config, name)} must be positive; give a value above 0")


def divisors(number: int) -> str:
    """The divisors of a number up to 256, as text for a message."""
    return ", ".join(str(divisor) for divisor in range(1, min(number, 256) + 1) if number % divisor == 0)
