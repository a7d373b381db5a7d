"""However many transfers have ended, the loop has its turn between a few of them."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from hsswap.errors import HsswapError
from hsswap.io.base import BlockIO, Operation, Transfer
from hsswap.io.memory import MemoryIO
from hsswap.io.posix import PosixIO
from hsswap.io.threads import DELIVERIES
from hsswap.io.uring import UringIO
from hsswap.io.uring_limits import TURN_TRANSFERS
from tests.io.support import PAGE, Pages, until
from tests.io.transfers import transfer

COUNT = 200


class Turns:
    """Counts the turns of the running loop while it is open."""

    def __init__(self) -> None:
        self.number = 0
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_soon(self._count)

    def _count(self) -> None:
        self.number += 1
        self._next = self._loop.call_soon(self._count)

    def close(self) -> None:
        self._next.cancel()


@pytest.mark.parametrize("make", [MemoryIO, PosixIO], ids=["memory", "posix"])
async def test_of_many_that_ended_together_few_are_told_in_a_turn(
    make: Callable[[], BlockIO], tmp_path: Path
) -> None:
    io = make()
    await io.start(None if io.name == "memory" else tmp_path)
    file = await io.create_file(tmp_path / "file", PAGE)
    moved, left = threading.Event(), COUNT
    lock = threading.Lock()

    def verify(_: Transfer) -> None:
        nonlocal left
        with lock:
            left -= 1
            if left == 0:
                moved.set()

    told = await ends(io, [transfer(Operation.READ, file, Pages(1), ignore, verify=verify)
                           for _ in range(COUNT)], moved.wait)  # fmt: skip
    assert max(told.values()) == DELIVERIES
    await io.close()


async def test_a_ring_starts_and_ends_few_in_a_turn(tmp_path: Path) -> None:
    io = UringIO()
    await io.start(tmp_path)
    file = await io.create_file(tmp_path / "file", PAGE)
    told = await ends(
        io, [transfer(Operation.READ, file, Pages(1), ignore) for _ in range(COUNT)], lambda: None
    )
    assert max(told.values()) <= 2 * TURN_TRANSFERS  # on the ring's event, and one that was due
    await io.close()


async def ends(
    io: BlockIO, batch: list[Transfer], when_submitted: Callable[[], object]
) -> Counter[int]:
    """How many ends were told in each turn of the loop."""
    told: Counter[int] = Counter()
    turns = Turns()

    def on_done(_: Transfer, error: HsswapError | None) -> None:
        assert error is None
        told[turns.number] += 1

    for one in batch:
        one.on_done = on_done
    io.submit(batch)
    when_submitted()  # the loop waits: they pile up
    await until(lambda: told.total() == len(batch))
    turns.close()
    return told


def ignore(transfer: Transfer, error: HsswapError | None) -> None:
    raise AssertionError("replaced")
