"""Reading a small file of ours with plain system calls, where no backend is at hand."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

FLAGS = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""No link is followed, as a store's backends follow none, and no pipe is waited for."""


def read_plain(path: Path, most: int = -1) -> bytes:
    """The first ``most`` bytes of a file, or all. Raises OSError, also for what is no file: a link,
    a pipe, a device that never ends.
    """
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | FLAGS)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a file", str(path))
        return file.read(most)
