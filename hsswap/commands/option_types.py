"""What options take, for argparse. Light: it is imported for every command."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

from hsswap.errors import ArgumentError, shown


def count(text: str) -> int:
    """A whole number of 1 or more."""
    return _whole(text, 1)


def count_or_zero(text: str) -> int:
    """A whole number of 0 or more."""
    return _whole(text, 0)


def counts(text: str) -> list[int]:
    """Whole numbers of 1 or more, with commas between."""
    return [count(part) for part in text.split(",")]


def at_most(most: int) -> Callable[[str], int]:
    """A :func:`count` with a limit."""

    def limited(text: str) -> int:
        if (value := count(text)) > most:
            raise argparse.ArgumentTypeError(f"{value} is too many; {most} at most")
        return value

    return limited


def named(text: str) -> Path:
    """A file or folder. An empty name, as of a variable that is not set, would be this folder."""
    if not text:
        raise argparse.ArgumentTypeError("the name is empty; give a path, or leave the option out")
    return Path(text)


def device_name(text: str) -> str:
    """A device's name."""
    kind, _, number = text.partition(":")
    known = kind == "cuda" and number.isascii() and number.isdigit() and len(number) < 10
    if text != "host" and not known:
        raise argparse.ArgumentTypeError(
            f"device {shown(text)} is unknown; known: host, cuda:N (N from 0)"
        )
    return text


def names_of(text: str | None, known: Sequence[str], option: str) -> list[str]:
    """The names in an option's list with commas, or all of them without one, in the order of
    ``known``. Raises ArgumentError for others.
    """
    if text is None:
        return list(known)
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise ArgumentError(f"{option} has {shown(unknown[0])}; known: {', '.join(known)}")
    return [name for name in known if name in names]


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{shown(text)} is not a whole number of {least} or more")
    if value >= 1 << 63:
        raise argparse.ArgumentTypeError(f"{shown(text)} is beyond 63 bits")
    return value
