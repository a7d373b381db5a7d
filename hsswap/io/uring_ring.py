"""One io_uring: set up, filled and drained. Knows nothing of transfers.

Which processors this is safe on, and why. Ring indices are shared with the kernel, and C programs
read and write them with acquire and release barriers, which Python has none of.

* Submission needs none anywhere: no kernel thread polls the ring, entries are read inside our own
  ``io_uring_enter``, on this thread, in program order.
* Completions are posted inside our own enter as well where ``DEFER_TASKRUN`` is on (Linux 6.1).
  Elsewhere another processor may post them: its entry, then the tail. On x86-64, where neither
  loads nor stores are reordered among themselves (Intel SDM 3A 8.2.2), who sees the new tail sees
  the entry. Each access is one aligned 32-bit move inside one call into C, so no compiler moves it.
* On AArch64 both may be reordered. DEFER_TASKRUN should make it sound there too, but before 6.2 a
  kernel worker could still post by itself, and nobody has run it: refused, posix is as good.
"""

from __future__ import annotations

import errno
import mmap
import os
import platform
import threading
from collections.abc import Callable, Sequence
from struct import Struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hsswap.forked import watch
from hsswap.io import uring_abi as abi

_SQE = Struct("<5Q")  # the words behind stay zero
SQE_BYTES, CQE_BYTES = 64, 16


Entry = tuple[int, int, int, int, int]
"""The words of an SQE that are used, as drawn in uring_abi. ``user_data`` is below 2^31."""

PROCESSORS = ("x86_64",)
SETUPS = (
    abi.SETUP_SUBMIT_ALL
    | abi.SETUP_SINGLE_ISSUER
    | abi.SETUP_DEFER_TASKRUN
    | abi.SETUP_TASKRUN_FLAG,
    abi.SETUP_SUBMIT_ALL | abi.SETUP_COOP_TASKRUN,
    0,
)
"""Best first. DEFER_TASKRUN: an interrupt only signals the eventfd, and a batch of completions is
finished in one enter; COOP_TASKRUN at least spares interrupting this thread."""
FEATURES = abi.FEAT_SINGLE_MMAP | abi.FEAT_NODROP | abi.FEAT_SUBMIT_STABLE | abi.FEAT_NATIVE_WORKERS

REASONS = {
    errno.ENOSYS: "this kernel has no io_uring",
    errno.EPERM: "the system forbids io_uring (sysctl kernel.io_uring_disabled=0, or a container "
    "without that seccomp filter, allows it)",
    errno.EACCES: "the system forbids io_uring",
    errno.ENOMEM: "no memory may be locked for a ring (ulimit -l)",
    errno.EINVAL: "this kernel's io_uring is too old; Linux 5.12 or newer is needed",
}


class RingCalls(NamedTuple):
    """The three system calls; tests put others in their place."""

    setup: Callable[[int, int], int] = abi.setup
    enter: Callable[[int, int, int, int], int] = abi.enter
    register: Callable[[int, int, int, int], int] = abi.register


class RingRefused(OSError):
    """No ring can be had here; the message says why, and ``errno`` is the system's number."""


class Ring:
    """A ring of at most ``entries`` operations in flight (a power of two).

    Neither descriptors nor buffers are registered. A ring used by one thread gains nothing by the
    first, and by the second little where buffers lie on huge pages, as host slots do; without them
    a drive's queue is what suffers (2-core virtual machine, Linux 6.18, virtio disk, 2026-11-30, us
    of processor a read, and MB/s)::

                                    READV              READ_FIXED
        64 KiB, 64 in flight        6.6, 2400          5.0, 2400   (registered file: 7.0 for 7.1)
        256 KiB, 32 in flight       8.5, 2800          7.5, 2800
        256 KiB, 4 KiB pages       37.2, 1200         24.6, 1200

    ``event``: a descriptor to add to the loop, readable when there is something to collect.
    ``unposted``: the kernel may have more than it posted. To be made, used and closed on one
    thread. Raises RingRefused.
    """

    def __init__(self, entries: int, calls: RingCalls | None = None) -> None:
        self._calls = calls or RingCalls()
        self._thread = threading.get_ident()
        self._set_up(entries)
        self.event = -1
        self._maps: list[mmap.mmap] = []
        try:
            self._map()
            self.event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
            number = np.array([self.event], np.int32)
            self._must(abi.REGISTER_EVENTFD, number, "registering an eventfd")
            watch(self, Ring._in_child)
        except BaseException:
            self.close()
            raise

    def _in_child(self) -> None:
        self._ring = -1  # a child that takes out what has ended takes it from its parent

    def _set_up(self, entries: int) -> None:
        if platform.machine() not in PROCESSORS:
            raise RingRefused(
                errno.ENOTSUP,
                f"io_uring without memory barriers is not proved on {platform.machine()}, only on "
                f"{', '.join(PROCESSORS)}",
            )
        for flags in SETUPS:
            params = np.zeros(abi.PARAMS_WORDS, np.uint32)
            params[2] = flags
            self._ring = self._calls.setup(entries, params.ctypes.data)
            if self._ring != -errno.EINVAL:
                break
        if self._ring < 0:
            raise refused(-self._ring)
        self.deferred = bool(flags & abi.SETUP_DEFER_TASKRUN)
        self.entries = int(params[0])
        self._params = params
        if int(params[5]) & FEATURES != FEATURES:
            os.close(self._ring)
            raise refused(errno.EINVAL)

    def _map(self) -> None:
        at = self._params.tolist()
        nbytes = max(at[abi.SQ_ARRAY] + 4 * at[0], at[abi.CQ_CQES] + CQE_BYTES * at[1])
        for length, offset in ((nbytes, abi.OFF_RINGS), (SQE_BYTES * at[0], abi.OFF_SQES)):
            flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
            self._maps.append(mmap.mmap(self._ring, length, flags=flags, offset=offset))
        rings, entries = self._maps
        # Python's own memoryview and struct are several times faster than NumPy at a few entries.
        self._sqes = memoryview(entries)
        cqes = memoryview(rings)[at[abi.CQ_CQES] :][: CQE_BYTES * at[1]]
        self._cqes = cqes.cast("i")
        self._words = memoryview(rings)[: nbytes & ~3].cast("I")  # one 32-bit move each
        self._sq_tail = at[abi.SQ_TAIL] // 4
        self._cq_head, self._cq_tail = at[abi.CQ_HEAD] // 4, at[abi.CQ_TAIL] // 4
        self._cq_mask = at[1] - 1
        self._sq_flags = at[abi.SQ_FLAGS] // 4
        self._tail, self._head = self._words[self._sq_tail], self._words[self._cq_head]
        index = np.frombuffer(rings, np.uint32, at[0], at[abi.SQ_ARRAY])
        index[:] = np.arange(at[0])  # entry n of the ring is always SQE n
        self._pending = 0
        self.unposted = False

    def _must(self, what: int, argument: NDArray[np.int32], doing: str) -> None:
        done = self._calls.register(self._ring, what, argument.ctypes.data, len(argument))
        if done < 0:
            raise RingRefused(-done, f"{doing} failed: {os.strerror(-done)}")

    @property
    def is_closed(self) -> bool:
        """Whether everything was given back."""
        return self._ring < 0

    @property
    def can_collect(self) -> bool:
        """Whether this thread can: of a ring that posts when it is asked, only its own."""
        return not self.deferred or threading.get_ident() == self._thread

    @property
    def pending(self) -> int:
        """Entries pushed and not taken by the kernel."""
        return self._pending

    def push(self, entries: Sequence[Entry]) -> None:
        """Put entries into the ring, for :meth:`submit`; not more than are free."""
        sqes, tail, last = self._sqes, self._tail, self.entries - 1
        for entry in entries:
            _SQE.pack_into(sqes, (tail & last) * SQE_BYTES, *entry)
            tail += 1
        self._tail = tail & 0xFFFFFFFF
        self._words[self._sq_tail] = self._tail
        self._pending += len(entries)

    def submit(self) -> int:
        """Hand what was pushed to the kernel. 0, or the error number of a kernel out of means.

        EAGAIN and EBUSY: what was not taken stays in the ring; reap, and submit again.
        """
        while self._pending:
            taken = self._calls.enter(self._ring, self._pending, 0, 0)
            if taken > 0:
                self._pending -= taken
            elif taken == 0:
                return errno.EAGAIN
            elif taken != -errno.EINTR:
                return -taken
        return 0

    def withdraw(self) -> int:
        """Take back what the kernel has not taken: it reads entries only inside enter."""
        count, self._pending = self._pending, 0
        self._tail = (self._tail - count) & 0xFFFFFFFF
        self._words[self._sq_tail] = self._tail
        return count

    @property
    def waiting(self) -> int:
        """Completions that are there to :meth:`take`."""
        return (self._words[self._cq_tail] - self._head) & 0xFFFFFFFF

    @property
    def more(self) -> bool:
        """Whether there may be something to take without another ring of the event."""
        return self.unposted or self.waiting > 0

    def collect(self) -> None:
        """Let the kernel post some of what has ended, unless something waits. Never waits."""
        if self.waiting:
            return
        self._finish()
        # Only now, because finishing rings as well: the loop would come once more, for nothing (a
        # third of its turns, seen at 8 in flight).
        try:  # noqa: SIM105 - contextlib.suppress costs more than the call
            os.eventfd_read(self.event)
        except BlockingIOError:
            pass
        # Whoever rang before that read had set the flag, or the tail, already; whoever rings from
        # now on is heard. That the flag is set is no proof that something waits: the kernel sets it
        # behind adding to its list, when this thread may have emptied that, and takes it back only
        # with the next. Waiting for it to go would be for ever when nothing else is in flight. The
        # kernel posts 20 at a time: of more, the others come when these were taken.
        words = self._words
        self.unposted = bool(words[self._sq_flags] & abi.SQ_TASKRUN)
        if self.unposted and not self.waiting:
            self._finish()
            self.unposted = self.waiting > 0

    def take(self, most: int) -> tuple[list[int], list[int]]:
        """``user_data`` and ``res`` of what waits, at most so many."""
        count = min(self.waiting, most)
        numbers, results = self._completions(self._head & self._cq_mask, count)
        self._head = (self._head + count) & 0xFFFFFFFF
        self._words[self._cq_head] = self._head
        return numbers, results

    def _finish(self) -> None:
        """Let the kernel post the completions that wait for an enter."""
        while self._calls.enter(self._ring, 0, 0, abi.ENTER_GETEVENTS) == -errno.EINTR:
            pass

    def _completions(self, begin: int, count: int) -> tuple[list[int], list[int]]:
        """The low words of ``user_data``, and ``res``, from an entry on, round the end."""
        beyond = begin + count - (self._cq_mask + 1)
        first, end = 4 * begin, 4 * (begin + count)  # words of 32 bits
        numbers = self._cqes[first:end:4].tolist()
        results = self._cqes[first + 2 : end : 4].tolist()
        if beyond > 0:
            more = self._completions(0, beyond)
            return numbers + more[0], results + more[1]
        return numbers, results

    def close(self) -> None:
        """Give everything back. Nothing may be in flight. Twice is fine."""
        if self._ring < 0:
            return
        # The mappings cannot be closed while views refer to them.
        self._sqes = self._cqes = self._words = memoryview(b"")
        for mapping in self._maps:
            mapping.close()
        for descriptor in (self.event, self._ring):
            if descriptor >= 0:
                os.close(descriptor)
        self._ring = self.event = -1


def refused(number: int) -> RingRefused:
    """Why a ring cannot be had, by error number."""
    return RingRefused(number, REASONS.get(number, f"io_uring failed: {os.strerror(number)}"))
