"""The queue of the uring backend over a ring that runs by a script: short counts, errors, spans."""

from __future__ import annotations

import ctypes
import errno
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap.errors import BlockIOError, HsswapError
from hsswap.io import uring_abi as abi
from hsswap.io.base import Operation, Transfer
from hsswap.io.counted import Ended, EndedSpans
from hsswap.io.linux import IOV_MAX
from hsswap.io.posix import PosixFile
from hsswap.io.problems import CameShort
from hsswap.io.uring_queue import ATTEMPTS, DriveQueue
from hsswap.io.uring_ring import Entry, Ring
from tests.io.support import PAGE, Pages, pattern
from tests.io.test_spans import Ends, spans
from tests.io.transfers import ignore, transfer


class FakeRing:
    """Runs entries on a bytes object, moving at most so many bytes each, or failing, by a script.

    ``seen``: opcode, offset, and count of iovecs (bytes where there are none) of each entry.
    """

    entries = 8
    unposted = False

    def __init__(self, content: bytes, script: list[int]) -> None:
        self.content = content
        self.script = list(script)
        self.pending = 0
        self.seen: list[tuple[int, int, int]] = []
        self._entries: list[Entry] = []
        self._ended: list[tuple[int, int]] = []

    def push(self, entries: list[Entry]) -> None:
        self._entries.extend(entries)
        self.pending = len(self._entries)

    def submit(self) -> int:
        for word, offset, table, count, number in self._entries:
            self.seen.append((word & 0xFF, offset, count))
            if word & 0xFF == abi.OP_READ:
                spans = [[table, count]]
            else:
                words = (ctypes.c_uint64 * (2 * count)).from_address(table)
                spans = np.ctypeslib.as_array(words).reshape(count, 2).tolist()
            self._ended.append((number, self._move(offset, spans)))
        self._entries.clear()
        self.pending = 0
        return 0

    def _move(self, offset: int, spans: list[list[int]]) -> int:
        limit = self.script.pop(0) if self.script else 1 << 60
        if limit < 0:
            return limit
        moved = 0
        for address, length in spans:
            piece = self.content[offset + moved : offset + moved + length][: limit - moved]
            ctypes.memmove(address, piece, len(piece))
            moved += len(piece)
        return moved

    def collect(self) -> None:
        """All that was submitted has ended."""

    @property
    def waiting(self) -> int:
        return len(self._ended)

    @property
    def more(self) -> bool:
        return self.waiting > 0

    def take(self, most: int) -> tuple[list[int], list[int]]:
        ended, self._ended = self._ended[:most], self._ended[most:]
        return [number for number, _ in ended], [result for _, result in ended]


def end_all(queue: DriveQueue, ring: FakeRing) -> list[tuple[Transfer, HsswapError | None]]:
    """Submit and reap until nothing is left."""
    ended: list[tuple[Transfer, HsswapError | None]] = []
    while ring.pending:
        assert queue.submit() == 0
        done: list[Ended] = []
        queue.reap(ring.entries, done, [])
        ended.extend((one, error) for one, error, nbytes in done if nbytes == one.nbytes)
    return ended


def reading(pages: Pages, offset: int, nbytes: int) -> Transfer:
    return transfer(Operation.READ, PosixFile(Path("file"), nbytes, 0), pages, ignore, offset)


SCRIPTS = st.lists(
    st.sampled_from([-errno.EINTR, -errno.EAGAIN, 1, 500, 4096, 4097, 8192, 9000]), max_size=12
)


@given(st.integers(1, 5), st.sampled_from([1, 3]), SCRIPTS, st.integers(1, 8))
def test_short_counts_go_on_at_the_right_place(
    spans: int, span_pages: int, script: list[int], transfers: int
) -> None:
    pages_each = spans * span_pages
    content = pattern(transfers * pages_each, PAGE, 1)
    ring = FakeRing(content.tobytes(), script)
    queue = DriveQueue(cast(Ring, ring), PAGE)
    targets = [Pages(spans, span_pages * PAGE) for _ in range(transfers)]
    work = [
        reading(pages, number * pages_each * PAGE, content.size)
        for number, pages in enumerate(targets)
    ]
    queue.add(work, direct=True)
    errors = {id(one): error for one, error in end_all(queue, ring)}
    assert len(errors) == transfers
    for number, one in enumerate(work):
        if errors[id(one)] is None:
            part = content[number * pages_each : (number + 1) * pages_each]
            assert targets[number].spans.tobytes() == part.tobytes()
        else:
            assert any(0 < step < PAGE for step in script)
    assert all(offset % PAGE == 0 for _, offset, _ in ring.seen)
    first, rest = ring.seen[:transfers], ring.seen[transfers:]
    assert {opcode for opcode, _, _ in first} == {abi.OP_READ if spans == 1 else abi.OP_READV}
    assert {opcode for opcode, _, _ in rest} <= {abi.OP_READV}


def test_long_runs_and_other_spans_share_a_submission() -> None:
    content = pattern(IOV_MAX + 10, PAGE, 1)
    ring = FakeRing(content.tobytes(), [])
    queue = DriveQueue(cast(Ring, ring), PAGE)
    long, single, short = Pages(IOV_MAX + 10), Pages(1, 3 * PAGE), Pages(2, 2 * PAGE)
    offsets = (0, 7 * PAGE, PAGE)
    work = [
        reading(pages, offset, content.size)
        for pages, offset in zip((long, single, short), offsets, strict=True)
    ]
    queue.add(work, direct=True)
    assert [error for _, error in end_all(queue, ring)] == [None, None, None]
    assert np.array_equal(long.spans, content)
    assert single.spans.tobytes() == content[7:10].tobytes()
    assert short.spans.tobytes() == content[1:5].tobytes()
    assert [count for _, _, count in ring.seen] == [IOV_MAX, 3 * PAGE, 2, 10]


@pytest.mark.parametrize("number", [errno.EIO, errno.EAGAIN])
def test_an_error_number_becomes_ours(number: int) -> None:
    ring = FakeRing(bytes(PAGE), [-number] * (ATTEMPTS + 1))
    queue = DriveQueue(cast(Ring, ring), PAGE)
    queue.add([reading(Pages(1), 0, PAGE)], direct=True)
    [(_, error)] = end_all(queue, ring)
    assert isinstance(error, BlockIOError)
    assert error.errno == number
    assert f"reading {PAGE} bytes at 0 of file" in str(error)
    assert len(ring.seen) == (1 if number == errno.EIO else ATTEMPTS + 1)


def test_spans_end_each_by_itself() -> None:
    content, pages = pattern(4, PAGE, 1), Pages(4)
    ring = FakeRing(content.tobytes(), [-errno.EAGAIN, PAGE, -errno.EIO, 100])
    queue = DriveQueue(cast(Ring, ring), PAGE)
    file = PosixFile(Path("file"), content.size, 0)
    reads = spans([file] * 4, [n * PAGE for n in (0, 3, 1, 2)], pages, Ends(4))
    queue.add_spans(reads, 0, 4, direct=True)
    assert queue.submit() == 0
    assert (queue.in_kernel, queue.in_drive) == (4, 0)
    ended: list[Ended] = []
    parts: list[EndedSpans] = []
    queue.reap(3, ended, parts)
    assert (queue.in_kernel, queue.in_drive, ring.more) == (1, 0, True)
    queue.reap(ring.entries, ended, parts)
    assert not ended
    errors = {number: error for _, numbers, error in parts for number in numbers}
    assert errors[1] is None
    assert np.array_equal(pages.spans[1], content[3])
    assert [isinstance(errors[n], CameShort) for n in (0, 2, 3)] == [True, False, True]
    assert isinstance(errors[2], BlockIOError)
    assert errors[2].errno == errno.EIO
    assert queue.in_kernel == 0
