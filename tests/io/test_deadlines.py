"""Deadlines while nothing ends: a stuck drive, a full ring, a store without room."""

from __future__ import annotations

import asyncio
import errno
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from hsswap.errors import (
    BlockIOError,
)
from hsswap.io import BlockStore
from hsswap.io.base import Operation, Transfer
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from hsswap.io.uring import UringIO
from tests.io.support import (
    BLOCK,
    DIMS,
    PAGE,
    Pages,
    Reading,
    fresh,
    pattern,
    read,
    write,
)
from tests.io.test_spans import Ends, filled, spans
from tests.io.transfers import Collector, ignore, run, transfer


@pytest.mark.parametrize("as_spans", [False, True], ids=["transfers", "spans"])
async def test_a_deadline_counts_while_the_drive_is_stuck(as_spans: bool, tmp_path: Path) -> None:
    stuck = Fault(FaultKind.HOLD, only="read")
    io = MemoryIO([stuck])
    await io.start(None)
    file = await io.create_file(tmp_path / "file", 8 * PAGE)
    first, collector, ends = Pages(1), Collector(), Ends(2)
    io.submit([transfer(Operation.READ, file, first, collector)])
    await asyncio.get_running_loop().run_in_executor(None, stuck.gate.reached.wait)
    soon = time.monotonic() + 0.01
    if as_spans:
        io.submit_spans(spans([file] * 2, [0, PAGE], Pages(2), ends, deadline=soon))
        errors = list((await ends.all()).values())
    else:
        late = [transfer(Operation.READ, file, Pages(1), ignore, deadline=soon) for _ in range(2)]
        errors = await run(io, *late)
    assert [error.errno for error in errors if isinstance(error, BlockIOError)] == [
        errno.ETIMEDOUT
    ] * 2
    assert collector.ended == []
    stuck.gate.opened.set()
    await collector.all(1)
    await io.close()


async def test_a_deadline_counts_while_the_ring_is_full(tmp_path: Path) -> None:
    io = UringIO(1)
    await io.start(tmp_path)
    file = await filled(io, tmp_path / "file", pattern(8, PAGE, 1))
    gate, reached, collector = threading.Event(), threading.Event(), Collector()

    def hold(one: Transfer) -> None:
        reached.set()
        gate.wait()

    io.submit([transfer(Operation.READ, file, Pages(1), collector, verify=hold)])
    await asyncio.get_running_loop().run_in_executor(None, reached.wait)
    soon, ends = time.monotonic() + 0.01, Ends(2)
    io.submit_spans(spans([file] * 2, [0, PAGE], Pages(2), ends, deadline=soon))
    late = [transfer(Operation.READ, file, Pages(1), ignore, deadline=soon) for _ in range(2)]
    for error in [*await run(io, *late), *(await ends.all()).values()]:
        assert isinstance(error, BlockIOError)
        assert error.errno == errno.ETIMEDOUT
    gate.set()
    await collector.all(1)
    await io.close()


async def test_a_deadline_counts_in_a_store_without_room(tmp_path: Path) -> None:
    stuck = Fault(FaultKind.HOLD, only="read")
    store = await BlockStore.open(DIMS, None, 64, io=MemoryIO([stuck], limit=2))
    indices, content = fresh(store, 20), pattern(20, BLOCK, 1)
    assert not (await write(store, 0, indices, content)).errors
    first = Reading(store, 0, indices[:1])
    await asyncio.get_running_loop().run_in_executor(None, stuck.gate.reached.wait)
    late = Reading(store, 0, indices[1::2], deadline=time.monotonic() + 0.01)
    errors = (await late.outcome.end()).errors
    assert [error.errno for error in errors.values() if isinstance(error, BlockIOError)] == [
        errno.ETIMEDOUT
    ] * 10
    assert not first.outcome.ended
    stuck.gate.opened.set()
    assert not (await first.outcome.end()).errors
    found, outcome = await read(store, 0, indices)
    assert not outcome.errors
    assert np.array_equal(found, content)
    await store.close()
