"""The faults of the memory backend happen as scripted."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import BlockIOError, ClosedError, HsswapError, OutOfSpace
from hsswap.io.base import IOFile, Operation, Priority, Transfer
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.io.support import PAGE, Pages, pattern

NAME = Path("file")


class Run:
    """A started backend with one file of 8 pages, its bytes 1 (operation 0 is its creation)."""

    def __init__(self, *faults: Fault) -> None:
        self.io = MemoryIO(faults)
        self.ended: list[HsswapError | None] = []

    async def __aenter__(self) -> Run:
        await self.io.start(None)
        self.file: IOFile = await self.io.create_file(NAME, 8 * PAGE)
        self.content[:] = 1
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.io.close()

    @property
    def content(self) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        content: np.ndarray[tuple[int], np.dtype[np.uint8]] = self.io.file_at(NAME).content
        return content

    def begin(
        self, operation: Operation, pages: Pages, first: int = 0
    ) -> asyncio.Future[HsswapError | None]:
        future: asyncio.Future[HsswapError | None] = asyncio.get_running_loop().create_future()
        one = Transfer(
            operation,
            self.file,
            first * PAGE,
            pages.addresses,
            PAGE,
            Priority.NEEDED,
            lambda transfer, error: future.set_result(error),
            owner=pages,
        )
        self.io.submit([one])
        return future

    async def read(self, first: int = 0, count: int = 4) -> tuple[Pages, HsswapError | None]:
        pages = Pages(count)
        pages.spans[:] = 2
        return pages, await self.begin(Operation.READ, pages, first)


def sums(pages: Pages) -> Sequence[int]:
    totals: list[int] = (pages.spans.astype(np.int64).sum(axis=1) // PAGE).tolist()
    return totals


async def test_errno_hits_the_nth_operation_alone() -> None:
    async with Run(Fault(FaultKind.ERRNO, at=2, errno=errno.ENOSPC)) as run:
        results = [await run.read() for _ in range(3)]
        assert [error is None for _, error in results] == [True, False, True]
        assert isinstance(results[1][1], OutOfSpace)
        assert sums(results[1][0]) == [2, 2, 2, 2]
        assert run.io.operations == ["create", "read", "read", "read"]


async def test_errno_on_file_operations() -> None:
    fault = Fault(FaultKind.ERRNO, errno=errno.EMFILE, only="sync")
    async with Run(fault) as run:
        with pytest.raises(BlockIOError, match="ulimit -n"):
            await run.io.sync(run.file)
        await run.io.sync(run.file)


async def test_short_and_torn() -> None:
    async with Run(Fault(FaultKind.SHORT, at=1), Fault(FaultKind.TORN, at=2)) as run:
        pages, error = await run.read()
        assert isinstance(error, BlockIOError)
        assert sums(pages) == [1, 1, 2, 2]
        pages, error = await run.read(count=1)
        assert error is None
        assert (pages.spans[0] == 1).sum() == PAGE // 2


async def test_torn_write() -> None:
    async with Run(Fault(FaultKind.TORN, at=1)) as run:
        pages = Pages(4)
        pages.spans[:] = pattern(4, PAGE, 1)
        assert await run.begin(Operation.WRITE, pages) is None
        assert np.array_equal(run.content[: 2 * PAGE], pages.spans[:2].reshape(-1))
        assert (run.content[2 * PAGE :] == 1).all()


@pytest.mark.parametrize("operation", Operation)
async def test_flip_changes_one_bit(operation: Operation) -> None:
    bit = (2 * PAGE + 5) * 8 + 3
    async with Run(Fault(FaultKind.FLIP, at=1, bit=bit)) as run:
        pages = Pages(4)
        pages.spans[:] = 1
        assert await run.begin(operation, pages) is None
        bytes_moved = run.content if operation is Operation.WRITE else pages.spans.reshape(-1)
        assert np.flatnonzero(bytes_moved != 1).tolist() == [2 * PAGE + 5]
        assert bytes_moved[2 * PAGE + 5] == 1 ^ 8


async def test_a_bad_spot() -> None:
    spot = (2 * PAGE, 2 * PAGE + 1)
    async with Run(Fault(FaultKind.ERRNO, count=None, offsets=spot)) as run:
        errors = [(await run.read(first, 1))[1] for first in range(4)]
        assert [error is None for error in errors] == [True, True, False, True]


async def test_hold_waits_for_the_gate() -> None:
    hold = Fault(FaultKind.HOLD, at=1)
    async with Run(hold) as run:
        pages = Pages(1)
        first, second = run.begin(Operation.READ, pages), run.begin(Operation.READ, Pages(1))
        await asyncio.get_running_loop().run_in_executor(None, hold.gate.reached.wait)
        assert run.io.operations == ["create", "read"]
        assert not first.done()
        hold.gate.opened.set()
        assert [await first, await second] == [None, None]
        assert sums(pages) == [1]


async def test_never_ends_until_close() -> None:
    async with Run(Fault(FaultKind.NEVER, at=1)) as run:
        lost = run.begin(Operation.READ, Pages(1))
        assert await run.begin(Operation.READ, Pages(1)) is None
        assert not lost.done()
        await run.io.close()
        assert isinstance(lost.result(), ClosedError)


async def test_close_opens_gates() -> None:
    hold = Fault(FaultKind.HOLD, at=1)
    async with Run(hold) as run:
        held = run.begin(Operation.READ, Pages(1))
        await run.io.close()
        assert held.result() is None
