"""Operating system errors in words, mapped into hsswap's tree at the edge where they arise."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from hsswap.errors import BlockIOError, OutOfSpace

REMEDIES = {
    errno.ENOSPC: "free some space, lower the capacity, or choose another directory",
    errno.EDQUOT: "free some of the quota, lower the capacity, or choose another directory",
    errno.EFBIG: "raise the limit of the file size (ulimit -f) or choose another file system",
    errno.EIO: "the drive reported a fault; look into the kernel's log (dmesg) and replace it",
    errno.EMFILE: "raise the limit of open files (ulimit -n)",
    errno.ENFILE: "raise the system's limit of open files (fs.file-max)",
    errno.EROFS: "choose a directory that can be written to",
    errno.EACCES: "choose a directory that this user may write to",
    errno.EPERM: "choose a directory that this user may write to",
    errno.ENOENT: "leave the store's directory alone while it is open",
    errno.EEXIST: "remove the file, or choose another directory",
    errno.EINVAL: "the file system refuses such requests; choose another one",
    errno.ENOMEM: "free some memory",
    errno.ETIMEDOUT: "the drive is too slow for the deadline; ask again without one, or for less",
}
"""What to do about an error number. Others get a general sentence."""

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


def io_error(number: int, what: str) -> BlockIOError:
    """The error for a system error number; ``what`` begins the message ("reading /d/file")."""
    reason = os.strerror(number)
    remedy = REMEDIES.get(number, "check the drive and the file system, then try again")
    kind = OutOfSpace if number in FULL else BlockIOError
    return kind(f"{what} failed: {reason}; {remedy}", errno=number)


def from_os_error(error: OSError, what: str) -> BlockIOError:
    """The error for an OSError, which the caller names as its cause."""
    return io_error(error.errno or errno.EIO, what)


class CameShort(BlockIOError):
    """A span came short or was turned away; a transfer would go on. Only inside this room."""


def unexpected(where: str, problem: Exception) -> BlockIOError:
    """The error for a fault of ours, which whoever waits must hear of."""
    error = BlockIOError(f"{where}: unexpected {problem!r}; please report it")
    error.__cause__ = problem
    return error


def is_named(path: Path, descriptor: int) -> bool:
    """Whether the path still names this open file, so that it is found again. Raises OSError."""
    try:
        return os.path.samestat(path.stat(follow_symlinks=False), os.fstat(descriptor))
    except (FileNotFoundError, NotADirectoryError):
        return False


def lost(what: str) -> BlockIOError:
    """The error for a file that was removed, moved or replaced under its open store."""
    return BlockIOError(
        f"{what} failed: the file was removed or replaced under its open store, so that nothing "
        "more is kept; close the store, open a new one, and leave its directory alone",
        errno=errno.ENOENT,
    )


def ended_early(what: str, moved: int, wanted: int) -> BlockIOError:
    """The error for a transfer that stopped moving bytes."""
    return BlockIOError(
        f"{what} ended after {moved} of {wanted} bytes; the file was cut short or the drive failed",
        errno=errno.EIO,
    )
