"""Writes that one thread makes side by side: what they write, what fails, what a turn takes on."""

from __future__ import annotations

import asyncio
import errno
import threading
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import BlockIOError, HsswapError
from hsswap.io import aio
from hsswap.io.aio import Aio
from hsswap.io.base import IOFile, Operation, Priority, Transfer
from hsswap.io.posix import PosixIO
from hsswap.io.together import GROUP_BYTES, TOGETHER, WriteGroup, prepare_some
from tests.io.support import PAGE, Pages, pattern
from tests.io.test_turns import Turns
from tests.io.transfers import Collector, ignore, run, transfer

COUNT = 40


@pytest.fixture
async def io(tmp_path: Path) -> AsyncIterator[PosixIO]:
    io = PosixIO(2)
    await io.start(tmp_path)
    if not io.direct:
        await io.close()
        pytest.skip("no direct I/O in the temporary folder")
    yield io
    await io.close()


@pytest.fixture
async def file(io: PosixIO, tmp_path: Path) -> IOFile:
    return await io.create_file(tmp_path / "file", 2 * COUNT * PAGE)


def quick_write(
    file: IOFile, pages: Pages, place: int, prepare: Callable[[Transfer], None] | None = None
) -> Transfer:
    return transfer(
        Operation.WRITE, file, pages, ignore, place * PAGE, Priority.WRITE, quick=True,
        prepare=prepare,
    )  # fmt: skip


def filled(spans: int, seed: int) -> Pages:
    pages = Pages(spans)
    pages.spans[:] = pattern(spans, PAGE, seed)
    return pages


async def content_of(io: PosixIO, file: IOFile, count: int) -> Pages:
    target = Pages(count)
    assert await run(io, transfer(Operation.READ, file, target, ignore)) == [None]
    return target


async def test_each_lands_in_its_place_with_its_hook_run_on_the_loop(
    io: PosixIO, file: IOFile
) -> None:
    sources = [filled(1 + number % 2, number) for number in range(COUNT)]
    threads: set[int] = set()

    def fill(one: Transfer) -> None:
        threads.add(threading.get_ident())
        sources[one.offset // (2 * PAGE)].spans[0, 0] = 77  # before the bytes leave

    batch = [quick_write(file, one, 2 * number, fill) for number, one in enumerate(sources)]
    assert await run(io, *batch) == [None] * COUNT
    assert threads == {threading.get_ident()}
    expected = np.zeros((2 * COUNT, PAGE), np.uint8)
    for number, one in enumerate(sources):
        assert one.spans[0, 0] == 77
        expected[2 * number : 2 * number + len(one.spans)] = one.spans
    assert np.array_equal((await content_of(io, file, 2 * COUNT)).spans, expected)
    statistics = io.statistics()
    assert (statistics.write_calls, statistics.bytes_written) == (COUNT, 60 * PAGE)
    assert file.in_flight == 0


async def test_only_those_fail_whose_hook_or_memory_is_bad(io: PosixIO, file: IOFile) -> None:
    def fail(one: Transfer) -> None:
        raise BlockIOError("made up")

    batch = [quick_write(file, filled(1, number), number) for number in range(6)]
    batch[2].prepare = fail
    batch[4].addresses = np.array([PAGE], np.uint64)  # nobody's
    errors = await run(io, *batch)
    assert [error is None for error in errors] == [True, True, False, True, False, True]
    assert str(errors[2]) == "made up"
    assert isinstance(errors[4], BlockIOError)
    assert errors[4].errno == errno.EFAULT
    written = (await content_of(io, file, 6)).spans
    for number in (0, 1, 3, 5):
        assert np.array_equal(written[number], pattern(1, PAGE, number)[0])
    assert not written[[2, 4]].any()


@pytest.mark.parametrize("moved", [0, 512, PAGE, -errno.EAGAIN, -errno.EINTR])
async def test_what_comes_short_goes_on(
    io: PosixIO, file: IOFile, monkeypatch: pytest.MonkeyPatch, moved: int
) -> None:
    groups: list[int] = []

    def short(self: Aio, descriptors: list[int], *_: object) -> list[int]:
        groups.append(len(descriptors))
        return [moved] * len(descriptors)

    monkeypatch.setattr(Aio, "write", short)
    sources = [filled(2, number) for number in range(4)]
    batch = [quick_write(file, one, 2 * number) for number, one in enumerate(sources)]
    assert await run(io, *batch) == [None] * 4
    assert groups == [4]
    expected = np.concatenate([one.spans for one in sources])
    assert np.array_equal((await content_of(io, file, 8)).spans, expected)


async def test_where_it_is_forbidden_they_are_made_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(which: int, *arguments: int) -> int:
        return -errno.EPERM

    monkeypatch.setattr(aio.Aio.__init__, "__defaults__", (forbidden,))
    io = PosixIO(2)
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", COUNT * PAGE)
    for seed in (0, 100):
        sources = [filled(1, seed + number) for number in range(COUNT)]
        batch = [quick_write(file, one, number) for number, one in enumerate(sources)]
        assert await run(io, *batch) == [None] * COUNT
        expected = np.concatenate([one.spans for one in sources])
        assert np.array_equal((await content_of(io, file, COUNT)).spans, expected)
    await io.close()


async def test_closing_makes_what_has_not_been_prepared(io: PosixIO, file: IOFile) -> None:
    collector = Collector()
    batch = [quick_write(file, filled(1, number), number) for number in range(COUNT)]
    for one in batch:
        one.on_done = collector
    io.submit(batch)
    await io.close()
    assert collector.errors == [None] * COUNT
    written = np.fromfile(file.path, np.uint8, COUNT * PAGE).reshape(COUNT, PAGE)
    assert np.array_equal(written, np.concatenate([pattern(1, PAGE, n) for n in range(COUNT)]))


async def test_a_turn_runs_few_hooks(io: PosixIO, file: IOFile) -> None:
    turns, hooks = Turns(), Counter[int]()

    def count(one: Transfer) -> None:
        hooks[turns.number] += 1

    batch = [quick_write(file, Pages(1), number, count) for number in range(COUNT)]
    assert await run(io, *batch) == [None] * COUNT
    turns.close()
    assert max(hooks.values()) <= TOGETHER
    assert hooks.total() == COUNT


def sized(pages: int, priority: Priority, seen: list[Transfer]) -> Transfer:
    """A write that need not be made."""
    where = np.full(pages, PAGE, np.uint64)
    file = IOFile(Path(), 0)
    return Transfer(Operation.WRITE, file, 0, where, PAGE, priority, ignore, seen.append)


def test_a_group_is_bound_by_count_bytes_and_priority() -> None:
    whole, half = GROUP_BYTES // PAGE, GROUP_BYTES // PAGE // 2
    pages = [1] * (TOGETHER + 1) + [half, half, half, whole + 1, whole, 1, 1]
    seen: list[Transfer] = []
    waiting = deque(sized(count, Priority.WRITE, seen) for count in pages)
    waiting[-1].priority = Priority.PREFETCH
    every = list(waiting)
    found = list[list[int]]()
    while waiting:
        group, failed = prepare_some(waiting)
        assert not failed
        assert group.nbytes == sum(one.nbytes for one in group.transfers)
        found.append([len(one.addresses) for one in group.transfers])
    assert found == [
        [1] * TOGETHER, [1, half], [half, half], [whole + 1], [whole], [1], [1]
    ]  # fmt: skip
    assert seen == every


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError])
def test_an_interrupted_turn_loses_nothing(error: type[BaseException]) -> None:
    def interrupt(one: Transfer) -> None:
        raise error

    seen: list[Transfer] = []
    waiting = deque(sized(1, Priority.WRITE, seen) for _ in range(3))
    waiting[1].prepare = interrupt
    with pytest.raises(error):
        prepare_some(waiting)
    assert len(waiting) == 3


def test_groups_join_up_to_the_same_bounds() -> None:
    def group(count: int, pages: int) -> WriteGroup:
        transfers = [sized(pages, Priority.WRITE, []) for _ in range(count)]
        return WriteGroup(transfers, sum(one.nbytes for one in transfers))

    first = group(TOGETHER - 2, 1)
    assert first.join(group(2, 1))
    assert not first.join(group(1, 1))
    assert len(first.transfers) == TOGETHER
    large = group(1, GROUP_BYTES // PAGE - 1)
    assert large.join(group(1, 1))
    assert not large.join(group(1, 1))
    assert large.nbytes == GROUP_BYTES
    failure = HsswapError("all")
    assert [error for _, error, _ in large.ended(failure)] == [failure] * 2
