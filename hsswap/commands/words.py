"""Numbers as people read them."""

from __future__ import annotations


def size(nbytes: int) -> str:
    """Bytes in powers of 1,024, as in ``1.1 MiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def counted(number: int, noun: str) -> str:
    """``1 core``, ``2 cores``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
