"""Backends by name."""

from __future__ import annotations

from collections.abc import Callable

from hsswap.errors import ConfigError
from hsswap.io.base import BlockIO
from hsswap.io.choose import AutoIO
from hsswap.io.gds import Compatibility, GdsIO
from hsswap.io.memory import MemoryIO
from hsswap.io.posix import PosixIO
from hsswap.io.uring import UringIO

BACKENDS: dict[str, Callable[[int], BlockIO]] = {
    "auto": AutoIO,
    "posix": PosixIO,
    "uring": lambda threads: UringIO(),
    "memory": lambda threads: MemoryIO(),
    "gds": GdsIO,
    "gds-compat": lambda threads: GdsIO(threads, compatibility=Compatibility.ALLOWED),
}
"""What :func:`open_backend` knows, made from a number of threads."""


def open_backend(name: str, *, threads: int = 4) -> BlockIO:
    """A backend, not started yet, by its name: one of :data:`BACKENDS`.

    ``gds`` is GPUDirect Storage or an error; ``gds-compat`` takes kvikio's compatibility path where
    there is no GPUDirect.
    ``auto`` measures and takes uring or posix, one of which works on every Linux and every file
    system, through the page cache if need be; it says so in ``path`` and ``why``. ``threads``
    counts for posix and gds. Raises ConfigError for
    another name or number.
    """
    make = BACKENDS.get(name)
    if make is None:
        raise ConfigError(f"io {name!r} is unknown; known: {', '.join(BACKENDS)}")
    return make(threads)
