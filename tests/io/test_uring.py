"""What only the uring backend does: refusals with reasons, short counts, a kernel without means."""

from __future__ import annotations

import asyncio
import ctypes
import errno
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.errors import BlockIOError, ConfigError, HsswapError
from hsswap.io import uring_abi as abi
from hsswap.io.base import IOFile, Operation, Priority, SpanReads, Transfer
from hsswap.io.uring import UringIO
from hsswap.io.uring_limits import BYTES_IN_FLIGHT, TURN_BYTES, TURN_TRANSFERS
from hsswap.io.uring_ring import Ring, RingCalls, RingRefused
from tests.io.support import PAGE, Pages, pattern, until
from tests.io.test_uring_queue import FakeRing
from tests.io.transfers import Collector, ignore, run, transfer

SHM = Path("/dev/shm")


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSYS, "has no io_uring"),
        (errno.EPERM, "io_uring_disabled=0"),
        (errno.EINVAL, "too old"),
        (errno.ENOMEM, "ulimit -l"),
        (errno.EMFILE, os.strerror(errno.EMFILE)),
    ],
)
async def test_a_refused_ring_says_why(tmp_path: Path, number: int, reason: str) -> None:
    io = UringIO(calls=RingCalls(setup=lambda *_: -number))
    with pytest.raises(ConfigError, match="io 'uring' cannot be used here") as caught:
        await io.start(tmp_path)
    assert reason in str(caught.value)
    assert "closed" in repr(io)


def test_a_refused_eventfd_leaves_nothing_open() -> None:
    with pytest.raises(RingRefused, match="eventfd"):
        Ring(8, RingCalls(register=lambda *_: -errno.EACCES))


def test_a_flag_that_the_kernel_left_behind_is_not_waited_for() -> None:
    ring = Ring(8)
    flags = ring._words[ring._sq_flags : ring._sq_flags + 1]
    flags[0] |= abi.SQ_TASKRUN  # set behind a list that this thread has emptied already
    ring.collect()
    assert not ring.more
    assert ring.take(8) == ([], [])
    flags.release()
    ring.close()


def test_other_processors_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "aarch64")
    with pytest.raises(RingRefused, match="not proved on aarch64"):
        Ring(8)


async def test_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="depth of the ring is 0"):
        UringIO(0)
    io = UringIO()
    with pytest.raises(ConfigError, match="needs a directory"):
        await io.start(None)
    await io.close()


def older_kernel(refused_flags: int) -> Callable[[int, int], int]:
    """A setup call of a kernel that does not know these flags."""

    def setup(entries: int, params: int) -> int:
        flags = ctypes.c_uint32.from_address(params + 8).value
        return -errno.EINVAL if flags & refused_flags else abi.setup(entries, params)

    return setup


@pytest.mark.parametrize(
    "refused_flags",
    [0, abi.SETUP_DEFER_TASKRUN, abi.SETUP_DEFER_TASKRUN | abi.SETUP_COOP_TASKRUN],
    ids=["6.1", "5.19", "5.12"],
)
async def test_older_kernels_do(tmp_path: Path, refused_flags: int) -> None:
    io = UringIO(4, calls=RingCalls(setup=older_kernel(refused_flags)))
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 64 * PAGE)
    source, target = Pages(64), Pages(64)
    source.spans[:] = pattern(64, PAGE, 1)
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    parts = [Pages(1) for _ in range(64)]
    reads = [transfer(Operation.READ, file, one, ignore, n * PAGE) for n, one in enumerate(parts)]
    assert await run(io, *reads, transfer(Operation.READ, file, target, ignore)) == [None] * 65
    assert np.array_equal(target.spans, source.spans)
    assert np.array_equal(np.concatenate([one.spans for one in parts]), source.spans)
    await io.close()


class Stingy:
    """enter of a kernel that turns the first submissions away, in turn with each of ``numbers``."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __call__(self, ring: int, submit_count: int, wait_count: int, flags: int) -> int:
        if submit_count and self.numbers:
            number = self.numbers.pop(0)
            return -number if number else 0
        return abi.enter(ring, submit_count, wait_count, flags)


async def test_a_kernel_without_means_is_asked_again(tmp_path: Path) -> None:
    stingy = Stingy([errno.EINTR, errno.EAGAIN, errno.EBUSY, 0, errno.EINTR])
    io = UringIO(4, calls=RingCalls(enter=stingy))
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    reads = [transfer(Operation.READ, file, Pages(1), ignore, n * PAGE) for n in range(16)]
    assert await run(io, *reads) == [None] * 16
    assert stingy.numbers == []
    await io.close()


async def test_a_kernel_without_means_for_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.io.uring_limits.RETRIES", 3)
    stingy = Stingy([errno.EBUSY] * 4)
    io = UringIO(4, calls=RingCalls(enter=stingy))
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    reads = [transfer(Operation.READ, file, Pages(1), ignore, n * PAGE) for n in range(3)]
    errors = await run(io, *reads)
    assert [error.errno for error in errors if isinstance(error, BlockIOError)] == [errno.EBUSY] * 3
    assert await run(io, transfer(Operation.READ, file, Pages(1), ignore)) == [None]
    await io.close()


async def one_error(io: UringIO, file: IOFile, pages: Pages) -> BlockIOError:
    [error] = await run(io, transfer(Operation.READ, file, pages, ignore))
    assert isinstance(error, BlockIOError)
    return error


async def test_real_faults(tmp_path: Path) -> None:
    io = UringIO()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    os.truncate(file.path, 3 * PAGE)
    error = await one_error(io, file, Pages(8))
    assert f"ended after {3 * PAGE} of {8 * PAGE} bytes" in str(error)
    nowhere = Pages(1)
    nowhere.addresses = np.array([PAGE], np.uint64)
    assert (await one_error(io, file, nowhere)).errno == errno.EFAULT
    assert await run(io, transfer(Operation.READ, file, Pages(3), ignore)) == [None]
    await io.close()


async def test_quick_hooks_run_on_the_loop_as_far_as_that_is_short(tmp_path: Path) -> None:
    io = UringIO(4)
    await io.start(tmp_path)
    run_bytes = TURN_BYTES // 2
    file = await io.create_file(tmp_path / "file", 8 * run_bytes)
    threads: list[int] = []

    def hook(one: Transfer) -> None:
        threads.append(threading.get_ident())

    hooks: dict[str, Any] = {"prepare": hook, "verify": hook, "quick": True}
    pages = [Pages(1, run_bytes) for _ in range(4)]
    work = [
        transfer(Operation.WRITE, file, one, ignore, number * run_bytes, Priority.NEEDED, **hooks)
        for number, one in enumerate(pages)
    ]
    assert await run(io, *work) == [None] * 4
    here = threading.get_ident()
    assert threads == [here] * 4
    long = Pages(1, 2 * TURN_BYTES)
    threads.clear()
    assert await run(io, transfer(Operation.READ, file, long, ignore, **hooks)) == [None]
    assert threads[0] != here
    assert await run(io, transfer(Operation.READ, file, Pages(1), ignore, **hooks)) == [None]
    assert threads[1] == here
    await io.close()


class BurstRing(FakeRing):
    """Nothing ends until the drive's queue is full; from then on all does, in the next turn."""

    deferred = True
    entries = 64

    def __init__(self, entries: int, calls: RingCalls | None) -> None:
        super().__init__(bytes(64 * PAGE), [])
        self.event = os.eventfd(0, os.EFD_NONBLOCK)
        self.is_closed = False
        self._was_full = False

    def submit(self) -> int:
        os.eventfd_write(self.event, 1)
        return super().submit()

    def collect(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self.event)
        self._was_full |= len(self._ended) == self.entries

    @property
    def waiting(self) -> int:
        return super().waiting if self._was_full else 0

    def take(self, most: int) -> tuple[list[int], list[int]]:
        return super().take(min(most, self.waiting))

    def close(self) -> None:
        if not self.is_closed:
            os.close(self.event)
        self.is_closed = True


async def test_spans_without_end_do_not_keep_transfers_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hsswap.io.uring.Ring", BurstRing)
    io = UringIO()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 64 * PAGE)
    pages, collector, told = Pages(1), Collector(), 0

    def again(reads: SpanReads, numbers: list[int], error: HsswapError | None) -> None:
        nonlocal told
        told += len(numbers)
        if not collector.ended and told < 100 * TURN_TRANSFERS:
            io.submit_spans(flood(len(numbers)))

    def flood(count: int) -> SpanReads:
        return SpanReads(
            [file] * count, [0] * count, pages.addresses.tolist() * count, PAGE,
            Priority.NEEDED, again, lambda reads, numbers: None,
        )  # fmt: skip

    one = transfer(Operation.READ, file, Pages(1), collector, verify=ignore_hook, quick=True)
    io.submit([one])
    io.submit_spans(flood(BurstRing.entries))
    await collector.all(1)
    assert told < 20 * TURN_TRANSFERS
    await io.close()


async def test_what_waits_is_started_before_bytes_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rings: list[BurstRing] = []
    most = 0

    class Watched(BurstRing):
        entries = 16

        def submit(self) -> int:
            nonlocal most
            number = super().submit()
            rings[:] = [self]
            most = max(most, len(self._ended))
            return number

    monkeypatch.setattr("hsswap.io.uring.Ring", Watched)
    io = UringIO(16)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 64 * PAGE)
    pages, ended = Pages(1), list[int]()
    started_before: list[int] = []  # how many the drive had, each time bytes were looked at
    unlooked_at: list[int] = []

    def look(reads: SpanReads, numbers: list[int]) -> None:
        started_before.append(len(rings[0].seen))
        unlooked_at.append(io._unverified.count)

    def done(reads: SpanReads, numbers: list[int], error: HsswapError | None) -> None:
        assert error is None
        ended.extend(numbers)

    io.submit_spans(
        SpanReads(
            [file] * 100, [0] * 100, pages.addresses.tolist() * 100, PAGE,
            Priority.NEEDED, done, look,
        )
    )  # fmt: skip
    await until(lambda: len(ended) == 100)
    assert sorted(ended) == list(range(100))
    assert started_before[0] == 2 * Watched.entries
    assert most == Watched.entries
    assert max(unlooked_at) <= Watched.entries
    await io.close()


def ignore_hook(one: Transfer) -> None:
    pass


async def test_needed_reads_find_room_behind_much_prefetch(tmp_path: Path) -> None:
    io = UringIO()
    await io.start(tmp_path)
    run_bytes = 256 * 1024
    file = await io.create_file(tmp_path / "file", 64 * run_bytes)
    collector, pages = Collector(), Pages(1, run_bytes)
    prefetch = [
        transfer(Operation.READ, file, pages, collector, n * run_bytes, Priority.PREFETCH)
        for n in range(64)
    ]
    needed = transfer(Operation.READ, file, Pages(1), collector)
    io.submit(prefetch)
    io.submit([needed])
    await collector.all(65)
    place = [one for one, _ in collector.ended].index(needed)
    assert place <= BYTES_IN_FLIGHT[Priority.PREFETCH] // run_bytes
    await io.close()


@pytest.mark.skipif(not os.access(SHM, os.W_OK), reason="/dev/shm, a tmpfs, cannot be written to")
async def test_the_page_cache_is_read_by_kernel_threads() -> None:
    place = SHM / f"hsswap-test-{os.getpid()}"
    place.mkdir()
    io = UringIO()
    try:
        await io.start(place)
        assert io.path == "page cache (tmpfs), io_uring"
        file = await io.create_file(place / "file", 4 * PAGE)
        source, target = Pages(4), Pages(4)
        source.spans[:] = pattern(4, PAGE, 1)
        assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
        assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
        assert np.array_equal(target.spans, source.spans)
        await io.remove_file(file)
    finally:
        await io.close()
        place.rmdir()


async def test_many_rounds_wrap_the_ring(tmp_path: Path) -> None:
    io = UringIO(5)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", 16 * PAGE)
    source = Pages(16)
    source.spans[:] = pattern(16, PAGE, 1)
    assert await run(io, transfer(Operation.WRITE, file, source, ignore)) == [None]
    for count in (1, 7, 3, 13, 2, 16, 5):
        parts = [Pages(1) for _ in range(count)]
        reads = [transfer(Operation.READ, file, p, ignore, n * PAGE) for n, p in enumerate(parts)]
        assert await run(io, *reads) == [None] * count
        for number, one in enumerate(parts):
            assert np.array_equal(one.spans[0], source.spans[number])
    await asyncio.gather(io.close(), io.close())
