"""Compiled kernels on disk, so that only the first start compiles.

A folder with one file a cubin, named by a hash of all that went into it (source, options, versions
of headers and compiler, architecture, and ``SCHEMA``). A file is written beside its place and
renamed into it, so readers see all of it or nothing; after a power loss an entry may be cut short,
which its own hash shows: it is removed and compiled again. Not promised: a limit in size (all
kernels of one shape are about half a megabyte).
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

SCHEMA = b"hsswap cubin 1\n"
"""Grows when the meaning of an entry changes; the first bytes of every entry."""

DIGEST_BYTES = 32


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where cubins go: HSSWAP_CACHE_DIR, else hsswap in XDG_CACHE_HOME or ``~/.cache``."""
    if chosen := environment.get("HSSWAP_CACHE_DIR"):
        return Path(chosen)
    base = environment.get("XDG_CACHE_HOME", "")
    # The XDG specification: a path that is not absolute is to be ignored.
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "hsswap"


class CubinCache:
    """Get and put; there is no "is it there", which could be wrong a moment later.

    A folder that cannot be written, or that others may write, is not used: a cache may fail
    silently, since all it loses is time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def _place(self, facts: Iterable[str]) -> Path:
        digest = hashlib.blake2b(SCHEMA, digest_size=DIGEST_BYTES)
        for fact in facts:
            # Lengths, so that no two lists of facts read the same.
            digest.update(len(fact).to_bytes(8, "little"))
            digest.update(fact.encode())
        return self._folder / f"{digest.hexdigest()}.cubin"

    def _is_ours(self) -> bool:
        """Whether nobody else can put code into the folder."""
        try:
            facts = self._folder.stat()
        except OSError:
            return False
        return facts.st_uid == os.geteuid() and not facts.st_mode & 0o022

    def get(self, facts: Iterable[str]) -> bytes | None:
        """The cubin of these facts, None when it is not there or damaged."""
        place = self._place(facts)
        if not self._is_ours():
            return None
        try:
            data = place.read_bytes()
        except OSError:
            return None
        start = len(SCHEMA) + DIGEST_BYTES
        cubin = data[start:]
        if data[: len(SCHEMA)] == SCHEMA and data[len(SCHEMA) : start] == _digest(cubin):
            return cubin
        with suppress(OSError):
            place.unlink()
        return None

    def put(self, facts: Iterable[str], cubin: bytes) -> None:
        """Keep a cubin."""
        place = self._place(facts)
        with suppress(OSError):
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self._is_ours():
                return
            descriptor, name = tempfile.mkstemp(dir=self._folder, prefix=".new-")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(SCHEMA + _digest(cubin) + cubin)
                os.replace(name, place)
            except BaseException:
                os.unlink(name)
                raise


def _digest(cubin: bytes) -> bytes:
    return hashlib.blake2b(cubin, digest_size=DIGEST_BYTES).digest()
