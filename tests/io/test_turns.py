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
from hsswap.io.uring_limits import TURN_BYTES, TURN_TRANSFERS, TurnEnds
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


def taken_each_turn(in_drive: int, count: int, nbytes: int) -> list[int]:
    """How many end in each turn, of ``count`` that ended together."""
    may, taken = TurnEnds(), list[int]()
    while sum(taken) < count:
        may.begin(None if taken else in_drive)
        taken.append(may.take(count - sum(taken), nbytes))
    return taken


def test_a_drive_with_nothing_to_do_waits_for_few() -> None:
    assert taken_each_turn(0, 64, 4096) == [4, 8, 12, 16, 16, 8]
    assert taken_each_turn(3, 40, 4096) == [6, 10, 14, 10]
    assert taken_each_turn(8, 64, 4096) == taken_each_turn(99, 64, 4096) == [TURN_TRANSFERS] * 4


def test_bytes_bound_a_turn_but_one_ends_always() -> None:
    assert taken_each_turn(99, 20, TURN_BYTES // 8) == [8, 8, 4]
    assert taken_each_turn(0, 9, TURN_BYTES // 8) == [2, 4, 3]
    assert taken_each_turn(0, 3, TURN_BYTES) == taken_each_turn(99, 3, 2 * TURN_BYTES) == [1, 1, 1]


def test_what_a_turn_may_end_is_shared() -> None:
    may = TurnEnds()
    may.begin(99)
    assert [may.take(10, TURN_BYTES // 16) for _ in range(3)] == [10, 6, 0]
    may.begin(99)
    assert [may.take(2, TURN_BYTES), may.take(2, 1)] == [1, 0]


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
