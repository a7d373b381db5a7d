"""Many direct reads in one call: what comes back, and a kernel that refuses or interrupts."""

from __future__ import annotations

import errno
import os
import platform
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from hsswap.io import aio
from hsswap.io.aio import NUMBERS, Aio, call
from hsswap.io.posix import PosixIO
from tests.io.support import PAGE, Pages, pattern
from tests.io.test_spans import Ends, filled, spans

_MINE = NUMBERS[platform.machine()]
SUBMIT, GETEVENTS = _MINE.submit, _MINE.getevents


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "file"
    path.write_bytes(pattern(16, PAGE, 1).tobytes())
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


def scripted(number: int, answers: list[int | None]) -> Callable[..., int]:
    """System calls; those of this number answer by the script, None and afterwards for real."""

    def system(which: int, *arguments: int) -> int:
        if which == number and answers and (answer := answers.pop(0)) is not None:
            return answer
        return call(which, *arguments)

    return system


def read_all(reads: Aio, descriptor: int, places: list[int], pages: Pages) -> list[int]:
    count = len(places)
    offsets = [PAGE * place for place in places]
    return reads.read([descriptor] * count, offsets, pages.addresses[:count].tolist(), PAGE)


def test_each_has_its_own_end(descriptor: int) -> None:
    content, pages, reads = pattern(16, PAGE, 1), Pages(8), Aio(8)
    assert read_all(reads, descriptor, [3, 15, 0, 3, 7], pages) == [PAGE] * 5
    assert np.array_equal(pages.spans[:5], content[[3, 15, 0, 3, 7]])
    pages.addresses[1] = PAGE  # nobody's
    assert read_all(reads, descriptor, [1, 2, 16], pages) == [PAGE, -errno.EFAULT, 0]
    assert reads.read([descriptor, 1 << 20], [0, 0], pages.addresses[2:4].tolist(), PAGE) == [
        PAGE,
        -errno.EBADF,
    ]
    reads.close()


@pytest.mark.parametrize(
    ("number", "answers"),
    [
        (SUBMIT, [-errno.EINTR, None]),
        (SUBMIT, [None, -errno.EAGAIN]),
        (GETEVENTS, [-errno.EINTR, -errno.EINTR]),
    ],
)
def test_a_kernel_that_interrupts(descriptor: int, number: int, answers: list[int | None]) -> None:
    pages, reads = Pages(6), Aio(6, scripted(number, answers))
    assert read_all(reads, descriptor, [0, 1, 2, 3, 4, 5], pages) == [PAGE] * 6
    assert np.array_equal(pages.spans, pattern(16, PAGE, 1)[:6])
    reads.close()


def test_a_kernel_that_takes_few_at_a_time(descriptor: int) -> None:
    def system(which: int, *arguments: int) -> int:
        if which == SUBMIT:
            context, count, pointers = arguments
            return call(which, context, min(count, 2), pointers)
        return call(which, *arguments)

    pages, reads = Pages(5), Aio(5, system)
    assert read_all(reads, descriptor, [4, 3, 2, 1, 0], pages) == [PAGE] * 5
    assert np.array_equal(pages.spans, pattern(16, PAGE, 1)[[4, 3, 2, 1, 0]])
    reads.close()


def test_a_kernel_that_refuses_one(descriptor: int) -> None:
    pages, reads = Pages(3), Aio(3, scripted(SUBMIT, [-errno.ENOMEM, 0, None]))
    expected = [-errno.ENOMEM, -errno.EAGAIN, PAGE]
    assert read_all(reads, descriptor, [0, 1, 2], pages) == expected
    reads.close()


async def test_where_it_is_forbidden_spans_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def forbidden(which: int, *arguments: int) -> int:
        asked.append(which)
        return -errno.EPERM

    monkeypatch.setattr(aio.Aio.__init__, "__defaults__", (forbidden,))
    io = PosixIO(2)
    await io.start(tmp_path)
    content = pattern(32, PAGE, 1)
    file = await filled(io, tmp_path / "file", content)
    for _ in range(2):
        pages, ends = Pages(20), Ends(20)
        io.submit_spans(spans([file] * 20, [PAGE * n for n in range(20)], pages, ends))
        assert set((await ends.all()).values()) == {None}
        assert np.array_equal(pages.spans, content[:20])
    assert len(asked) <= 2  # a thread each
    await io.close()


async def test_contexts_are_given_back_on_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_back: list[int] = []
    close = Aio.close

    def note(reads: Aio) -> None:
        given_back.append(threading.get_ident())
        close(reads)

    monkeypatch.setattr(Aio, "close", note)
    io = PosixIO(2)
    await io.start(tmp_path)
    if not io.direct:
        pytest.skip("no direct I/O in the temporary folder")
    file = await filled(io, tmp_path / "file", pattern(32, PAGE, 1))
    for _ in range(3):
        ends = Ends(64)
        io.submit_spans(spans([file] * 64, [0] * 64, Pages(64), ends))
        await ends.all()
    await io.close()
    assert 1 <= len(given_back) <= 2
    assert threading.get_ident() not in given_back


def write_all(
    aio: Aio, descriptor: int, pages: Pages, offsets: list[int], counts: list[int]
) -> list[int]:
    """Write the pages in their order, so many in each write."""
    iovecs = np.stack((pages.addresses, np.full(len(pages.addresses), PAGE, np.uint64)), axis=1)
    begins = np.cumsum([0, *counts[:-1]])
    tables = [iovecs.ctypes.data + 16 * begin for begin in begins.tolist()]
    return aio.write([descriptor] * len(counts), offsets, tables, counts)


def test_writes_of_several_spans_each(tmp_path: Path) -> None:
    path, pages, aio_ = tmp_path / "file", Pages(6), Aio(4)
    path.write_bytes(bytes(12 * PAGE))
    pages.spans[:] = pattern(6, PAGE, 2)
    descriptor = os.open(path, os.O_RDWR)
    places = [7, 0, 3]
    moved = write_all(aio_, descriptor, pages, [PAGE * place for place in places], [1, 3, 2])
    assert moved == [PAGE, 3 * PAGE, 2 * PAGE]
    expected = np.zeros((12, PAGE), np.uint8)
    expected[[7, 0, 1, 2, 3, 4]] = pages.spans
    assert path.read_bytes() == expected.tobytes()
    os.close(descriptor)
    aio_.close()
