"""io_uring's numbers, layouts and system calls.

After linux/io_uring.h and man 2 io_uring_setup, io_uring_enter, io_uring_register. Names are the
kernel's without their prefix. The structures are the same on every 64-bit processor::

    SQE, 64 bytes, as 8 words of 64 bits           CQE, 16 bytes
    0  opcode u8 | flags u8 | ioprio u16 | fd s32  user_data u64 | res s32 | flags u32
    1  file offset
    2  address: of the iovecs, or of the buffer
    3  len u32 (iovecs, or bytes) | rw_flags u32
    4  user_data
    5  buf_index u16 | personality u16 | splice_fd_in s32
    6, 7  zero

    io_uring_params, 30 words of 32 bits: 0 sq_entries | 1 cq_entries | 2 flags | 5 features
    10  sq_off: head, tail, ring_mask, ring_entries, flags, dropped, array, -, (user_addr u64)
    20  cq_off: head, tail, ring_mask, ring_entries, overflow, cqes, flags, -, (user_addr u64)
"""  # fmt: skip

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

SETUP_CALL, ENTER_CALL, REGISTER_CALL = 425, 426, 427
"""The same numbers on every processor but alpha."""

OP_READV, OP_WRITEV = 1, 2
OP_READ, OP_WRITE = 22, 23  # 5.6: one buffer, no iovecs

SQE_ASYNC = 1 << 4
"""Goes to a kernel thread at once: what would copy from the page cache, or wait, inside enter."""

SETUP_SUBMIT_ALL = 1 << 7  # 5.18
SETUP_COOP_TASKRUN = 1 << 8  # 5.19
SETUP_TASKRUN_FLAG = 1 << 9  # 5.19
SETUP_SINGLE_ISSUER = 1 << 12  # 6.0
SETUP_DEFER_TASKRUN = 1 << 13  # 6.1

FEAT_SINGLE_MMAP = 1 << 0  # 5.4: both rings in one mapping
FEAT_NODROP = 1 << 1  # 5.5: completions are kept when their ring is full
FEAT_SUBMIT_STABLE = 1 << 2  # 5.5: iovecs may be reused once enter returned
FEAT_NATIVE_WORKERS = 1 << 9  # 5.12: what cannot go at once runs on threads of this process

ENTER_GETEVENTS = 1 << 0

SQ_TASKRUN = 1 << 2
"""In the word at SQ_FLAGS: completions wait for an enter (with SETUP_TASKRUN_FLAG)."""

REGISTER_EVENTFD = 4

OFF_RINGS = 0
OFF_SQES = 0x10000000

PARAMS_WORDS = 30
SQ_HEAD, SQ_TAIL, SQ_MASK, SQ_ENTRIES, SQ_FLAGS, SQ_DROPPED, SQ_ARRAY = range(10, 17)
CQ_HEAD, CQ_TAIL, CQ_MASK, CQ_ENTRIES, CQ_OVERFLOW, CQ_CQES, CQ_FLAGS = range(20, 27)
"""Words of io_uring_params that hold offsets into the mapping of the rings."""


@cache
def _syscall() -> Any:
    # None of these waits. Letting the interpreter go meanwhile would mean getting it back from
    # whichever thread took it.
    function = ctypes.PyDLL(None, use_errno=True).syscall
    function.restype = ctypes.c_long
    function.argtypes = [ctypes.c_long] * 7
    return function


def enter(ring: int, submit_count: int, wait_count: int, flags: int) -> int:
    """Submit entries and reap completions; entries taken, or ``-errno``. Waits only for a count."""
    taken: int = _syscall()(ENTER_CALL, ring, submit_count, wait_count, flags, 0, 0)
    return taken if taken >= 0 else -ctypes.get_errno()


def setup(entries: int, params: int) -> int:
    """A new ring's descriptor, or ``-errno``. ``params``: address of io_uring_params."""
    ring: int = _syscall()(SETUP_CALL, entries, params, 0, 0, 0, 0)
    return ring if ring >= 0 else -ctypes.get_errno()


def register(ring: int, what: int, argument: int, count: int) -> int:
    """io_uring_register: its result, or ``-errno``. ``argument``: an address."""
    done: int = _syscall()(REGISTER_CALL, ring, what, argument, count, 0, 0)
    return done if done >= 0 else -ctypes.get_errno()
