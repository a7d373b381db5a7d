"""The system calls that Python's os module lacks: preadv/pwritev over addresses, statx, statfs.

ctypes releases the GIL during each call. Structures are those of 64-bit Linux (man 2 preadv, statx,
statfs).
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

IOVEC_BYTES = 16
IOV_MAX = 1024
"""Spans one call takes (limits.h; the kernel's UIO_MAXIOV)."""

AT_EMPTY_PATH = 0x1000
STATX_DIOALIGN = 0x2000
"""Since Linux 6.1; the file systems followed one by one, so the answer may lack it."""

VectoredCall = Callable[[int, int, int, int], int]
"""``call(descriptor, address of iovecs, count of iovecs, file offset)``: bytes, or ``-errno``."""


class FileSystem(NamedTuple):
    """A kind of file system; ``direct``: whether it does direct I/O where statx does not say."""

    name: str
    direct: bool


FILE_SYSTEMS = {
    0x01021994: FileSystem("tmpfs", False),  # accepts O_DIRECT since Linux 6.6, and ignores it
    0x858458F6: FileSystem("ramfs", False),
    0xEF53: FileSystem("ext4", True),
    0x58465342: FileSystem("xfs", True),
    0x9123683E: FileSystem("btrfs", True),
    0xF2F52010: FileSystem("f2fs", True),
    0x6969: FileSystem("nfs", True),
    0x794C7630: FileSystem("overlay", True),  # its open fails where the layer below cannot
    0x2FC12FC1: FileSystem("zfs", False),  # accepts the flag before 2.3, and ignores it
    0x65735546: FileSystem("fuse", False),  # up to the server
}
"""By the magic number of man 2 statfs. Kinds not listed are used through the page cache."""


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    vectored = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64]
    for name in ("preadv", "pwritev"):
        function = getattr(library, name)
        function.argtypes = vectored
        function.restype = ctypes.c_ssize_t
    return library


def preadv(descriptor: int, iovecs: int, count: int, offset: int) -> int:
    """Read into ``count`` iovecs at the address ``iovecs``; bytes, or ``-errno``."""
    moved: int = _libc().preadv(descriptor, iovecs, count, offset)
    return moved if moved >= 0 else -ctypes.get_errno()


def pwritev(descriptor: int, iovecs: int, count: int, offset: int) -> int:
    """Write from ``count`` iovecs at the address ``iovecs``; bytes, or ``-errno``."""
    moved: int = _libc().pwritev(descriptor, iovecs, count, offset)
    return moved if moved >= 0 else -ctypes.get_errno()


class Moved(NamedTuple):
    """How far a run of vectored calls came. ``error``: the system's number, 0 without one."""

    nbytes: int
    error: int


def move_all(
    call: VectoredCall,
    descriptor: int,
    addresses: NDArray[np.uint64],
    span_bytes: int,
    offset: int,
    alignment: int,
) -> Moved:
    """Move a whole run: at most IOV_MAX spans a call, short counts continued, EINTR repeated.

    Direct I/O can go on only at an aligned place, so a count that is not aligned is rounded down
    and the rest of that page moved again. Ends before the whole at the end of a file (no error)
    or when a call makes less than one aligned step.
    """
    iovecs = np.empty((len(addresses), 2), np.uint64)
    iovecs[:, 0] = addresses
    iovecs[:, 1] = span_bytes
    table = iovecs.__array_interface__["data"][0]
    total = len(addresses) * span_bytes
    done = 0
    while done < total:
        span, within = divmod(done, span_bytes)
        if within:
            iovecs[span] = addresses[span] + np.uint64(within), span_bytes - within
        count = min(len(addresses) - span, IOV_MAX)
        moved = call(descriptor, table + IOVEC_BYTES * span, count, offset + done)
        if moved == -errno.EINTR:
            continue
        if moved < 0:
            return Moved(done, -moved)
        step = moved if done + moved == total else moved - moved % alignment
        if step == 0:
            return Moved(done, 0)
        done += step
    return Moved(done, 0)


def file_system(directory: Path) -> FileSystem:
    """The kind of file system a directory is in. Raises OSError."""
    answer = (ctypes.c_long * 32)()
    if _libc().statfs(os.fsencode(directory), answer) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(directory))
    magic = answer[0] & 0xFFFFFFFF
    return FILE_SYSTEMS.get(magic, FileSystem(f"type {magic:#x}", False))


def direct_alignment(descriptor: int) -> int | None:
    """What statx says direct I/O on an open file must be aligned to, in bytes.

    0: the file cannot do direct I/O. None: this kernel or file system does not say.

    ::

        struct statx   0 mask u32 | ... | 152 dio_mem_align u32 | 156 dio_offset_align u32 | to 256
    """
    answer = (ctypes.c_uint32 * 64)()
    try:
        call = _libc().statx
    except AttributeError:  # glibc before 2.28
        return None
    if call(descriptor, b"", AT_EMPTY_PATH, STATX_DIOALIGN, answer) != 0:
        return None
    if not answer[0] & STATX_DIOALIGN:
        return None
    memory, offset = answer[38], answer[39]
    return max(memory, offset) if memory and offset else 0
