"""Linux's old asynchronous I/O: a thread starts many direct transfers in one call, waits for all.

Containers that forbid io_uring allow it. Only with direct I/O does it start anything without
waiting for it. After linux/aio_abi.h and man 2 io_submit::

    iocb, 64 bytes, as 8 words of 64 bits               io_event, 32 bytes
    0  data                                              data u64 | obj u64 | res s64 | res2 s64
    1  key u32 | rw_flags u32
    2  opcode u16 | priority s16 | descriptor u32
    3  address of the buffer, or of a table of iovecs
    4  bytes, or iovecs
    5  file offset
    6  zero
    7  flags u32 | eventfd u32
"""  # fmt: skip

from __future__ import annotations

import ctypes
import errno
import platform
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import numpy as np

IOCB_BYTES = 64
PREAD, PWRITEV = 0, 8


class Numbers(NamedTuple):
    """Of the system calls."""

    setup: int
    destroy: int
    getevents: int
    submit: int


NUMBERS = {"x86_64": Numbers(206, 207, 208, 209), "aarch64": Numbers(0, 1, 4, 2)}


@cache
def _syscall() -> Any:
    function = ctypes.CDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long] * 6
    return function


def call(number: int, *arguments: int) -> int:
    """The result of a system call, or ``-errno``. Releases the GIL."""
    padded = (*arguments, *(0,) * (5 - len(arguments)))
    result: int = _syscall()(number, *padded)
    return result if result >= 0 else -ctypes.get_errno()


class Aio:
    """Up to ``count`` transfers at a time, for one thread. Raises OSError where that cannot be had.

    ``system``: :func:`call`; tests put another in its place.
    """

    def __init__(self, count: int, system: Callable[..., int] = call) -> None:
        numbers = NUMBERS.get(platform.machine())
        if numbers is None:
            raise OSError(errno.ENOSYS, f"no numbers are known for {platform.machine()}")
        self._numbers = numbers
        self._system = system
        context = ctypes.c_ulong()
        done = system(numbers.setup, count, ctypes.addressof(context))
        if done < 0:
            raise OSError(-done, "io_setup failed")
        self._context = context.value
        self._iocbs = np.zeros((count, 8), np.uint64)
        first = self._iocbs.ctypes.data
        self._pointers = np.arange(count, dtype=np.uint64) * np.uint64(IOCB_BYTES)
        self._pointers += np.uint64(first)
        self._events = np.zeros((count, 4), np.int64)

    def read(
        self, descriptors: list[int], offsets: list[int], addresses: list[int], nbytes: int
    ) -> list[int]:
        """Read ``nbytes`` bytes each, and wait for all: bytes that came, or ``-errno``, of each."""
        return self._run(PREAD, descriptors, offsets, addresses, nbytes)

    def write(
        self, descriptors: list[int], offsets: list[int], tables: list[int], counts: list[int]
    ) -> list[int]:
        """Write what the iovecs of each say, ``counts`` of them at the address ``tables``, and wait
        for all: bytes that went, or ``-errno``, of each.
        """
        return self._run(PWRITEV, descriptors, offsets, tables, counts)

    def _run(
        self,
        opcode: int,
        descriptors: list[int],
        offsets: list[int],
        addresses: list[int],
        lengths: int | list[int],
    ) -> list[int]:
        count = len(descriptors)
        iocbs = self._iocbs[:count]
        iocbs[:, 0] = np.arange(count)
        iocbs[:, 2] = np.array(descriptors, np.uint64) << np.uint64(32) | np.uint64(opcode)
        iocbs[:, 3] = addresses
        iocbs[:, 4] = lengths
        iocbs[:, 5] = offsets
        results = [-errno.EAGAIN] * count
        started = ended = 0
        while ended < count:
            if started < count:
                pointers = self._pointers[started:count].ctypes.data
                taken = self._system(self._numbers.submit, self._context, count - started, pointers)
                if taken > 0:
                    started += taken
                elif started == ended and taken != -errno.EINTR:
                    # Nothing is under way whose end would make room: it is the next one's error.
                    results[started] = taken or -errno.EAGAIN
                    started += 1
                    ended += 1
            if wanted := started - ended:
                ended += self._wait(wanted, results)
        return results

    def _wait(self, wanted: int, results: list[int]) -> int:
        """Wait for so many; how many ended."""
        events = self._events.ctypes.data
        ended = self._system(self._numbers.getevents, self._context, wanted, wanted, events)
        if ended == -errno.EINTR:
            return 0
        assert ended >= 0, f"io_getevents: {ended}"
        for number, _, result, _ in self._events[:ended].tolist():
            results[number] = result
        return ended

    def close(self) -> None:
        """Give the context back; nothing may be under way."""
        self._system(self._numbers.destroy, self._context)
