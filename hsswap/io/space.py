"""How much of the disk a store may use."""

from __future__ import annotations

import asyncio
import os
from dataclasses import dataclass
from pathlib import Path

from hsswap.errors import OutOfSpace
from hsswap.io.problems import from_os_error


@dataclass(frozen=True)
class SpaceLimits:
    """``disk_bytes``: what the store's files may take together, all of them; None: no limit.
    ``free_bytes``: what must stay free in the file system.
    """

    disk_bytes: int | None = None
    free_bytes: int = 0

    @property
    def any(self) -> bool:
        """Whether there is a limit."""
        return self.disk_bytes is not None or self.free_bytes > 0


class SpaceBudget:
    """Bytes that a store's files take, counted as they are made: their space is allocated then."""

    def __init__(self, limits: SpaceLimits) -> None:
        self.limits = limits
        self.used_bytes = 0

    def excess(self, nbytes: int) -> int:
        """By how many bytes a file of this length would pass the limit."""
        limit = self.limits.disk_bytes
        return 0 if limit is None else max(0, self.used_bytes + nbytes - limit)

    def out_of_space(self, nbytes: int) -> OutOfSpace:
        """The error for a file that would pass the limit."""
        return OutOfSpace(
            f"the store may take {self.limits.disk_bytes} bytes and takes {self.used_bytes}; "
            f"{nbytes} more are needed: free sequences or raise disk_bytes"
        )

    async def check_floor(self, directory: Path, nbytes: int) -> None:
        """Raise OutOfSpace when the file system would have too little left."""
        floor = self.limits.free_bytes
        if floor <= 0:
            return
        loop = asyncio.get_running_loop()
        try:
            answer = await loop.run_in_executor(None, os.statvfs, directory)
        except OSError as error:
            raise from_os_error(error, f"looking for free space in {directory}") from error
        free = answer.f_bavail * answer.f_frsize
        if free - nbytes < floor:
            raise OutOfSpace(
                f"{directory} has {free} bytes free, of which {floor} must stay so; a segment of "
                f"{nbytes} does not fit: free some space or lower free_bytes"
            )
