"""A process that forks while a swap is open: the child is told, waits for nothing, breaks nothing.

Each case is a process of its own, which forks; pytest's has threads of other tests.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.running import ENVIRONMENT, PROJECT

BEGIN = """
import asyncio, os, signal, sys
from dataclasses import replace
from pathlib import Path
import numpy as np
import hsswap
from hsswap import ClosedError, HighSpeedSwap, StoreLocked
from tests.swap_cases import SMALL, config_for, random_case

case = random_case(SMALL, 700, seed=3)
place = Path(sys.argv[1])
config = replace(config_for(case, sequences=2), directory=place, persist=True, io=sys.argv[2])
rows = range(500)
row = case.queries[0][:1]

def part(start, stop):
    return [(n, case.keys[n][start:stop], case.values[n][start:stop]) for n in range(3)]

def in_child(work):
    # The child ends as if from work; the parent sees how.
    sys.stdout.flush()
    if os.fork():
        status = os.waitstatus_to_exitcode(os.wait()[1])
        assert status == 0, status
        return
    signal.alarm(20)
    sys.exit(work())

def refused(call):
    try:
        call()
    except ClosedError as error:
        assert "fork of the one that opened" in str(error), error
    else:
        raise AssertionError("no error")
"""

BLOCKING = """
with hsswap.blocking(config) as swap:
    sequence = swap.sequence()
    for each in part(0, 500):
        sequence.append(*each)
    swap.flush()
    before = sorted(place.iterdir())

    def child():
        for call in (
            lambda: sequence.append(*part(500, 520)[0]),
            lambda: sequence.attend(0, case.queries[0][490:500]),
            lambda: sequence.truncate(400),
            lambda: sequence.truncate(500),
            lambda: sequence.fork(),
            lambda: sequence.reserve(10),
            lambda: sequence.commit(rows),
            lambda: swap.sequence(),
            lambda: swap.open_prefix(rows),
            lambda: swap.attend_batch(0, [sequence], row, row.copy()),
            lambda: swap.flush(),
            lambda: swap.run(lambda real: real.alloc_disk_block_id()),
        ):
            refused(call)
        repr(swap.statistics()), swap.diagnostic_summary(), sequence.length
        with hsswap.blocking(replace(config, directory=None, persist=False)) as own:
            ours = own.sequence()
            ours.append(*part(0, 500)[0])
            ours.attend(0, case.queries[0][490:500]).synchronize()
        sequence.close()
        swap.close()

    in_child(child)
    assert sorted(place.iterdir()) == before
    for each in part(500, 700):
        sequence.append(*each)
    result = sequence.attend(0, case.queries[0][690:700])
    result.synchronize()
    assert sequence.commit(range(700)) == 688
with hsswap.blocking(config) as swap:
    assert swap.open_prefix(range(700)).length == 688
"""

BUSY = """
# Another thread holds the lock, or is about to take it, whenever this one forks.
import threading
with hsswap.blocking(config) as swap:
    sequence = swap.sequence()
    for each in part(0, 500):
        sequence.append(*each)
    goes_on = True

    def others():
        while goes_on:
            with swap._swap.lock:
                swap.statistics()

    thread = threading.Thread(target=others)
    thread.start()
    for _ in range(8):
        in_child(lambda: refused(swap.sequence))
    goes_on = False
    thread.join()
"""

AWAITED = """
async def main():
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        for each in part(0, 500):
            await sequence.append(*each)
        await swap.flush()
        sys.stdout.flush()
        if not os.fork():
            signal.alarm(20)
            for call in (
                lambda: sequence.append(*part(500, 520)[0]),
                lambda: sequence.attend(0, case.queries[0][490:500]),
                lambda: sequence.commit(rows),
                lambda: swap.flush(),
            ):
                try:
                    await call()
                except ClosedError as error:
                    assert "fork of the one that opened" in str(error), error
                else:
                    raise AssertionError("no error")
            return "child"
        assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
        result = await sequence.attend(0, case.queries[0][490:500])
        await result.done()
        assert await sequence.commit(rows) == 496
    return "parent"

# The loop is the parent's too: in the child it is not closed.
who = asyncio.new_event_loop().run_until_complete(main())
if who == "child":
    os._exit(0)
"""

PENDING = """
# What is awaited when the parent forks: a stream that does not go on keeps all of it waiting.
import threading

async def start():
    three = replace(config_for(case, sequences=3), directory=place, persist=True, io=sys.argv[2])
    swap = await HighSpeedSwap.create(three)
    sequence, other, reads = swap.sequence(), swap.sequence(), swap.sequence()
    for each in part(0, 500):
        await sequence.append(*each)
        await reads.append(*each)
    await swap.flush()
    gate = threading.Event()
    swap.stream_of(None).enqueue("waits", lambda work, scratch: gate.wait(), None)
    for layer, keys, values in part(0, 32):
        await other.append(layer, keys, values)
    result = await other.attend(0, case.queries[0][:32])
    tasks = [
        asyncio.create_task(call)
        for call in (
            result.done(), swap.flush(), sequence.commit(rows), other.close(),
            reads.attend(0, case.queries[0][490:500]),
        )
    ]
    for _ in range(5):
        await asyncio.sleep(0)
    return swap, sequence, gate, result, tasks

loop = asyncio.new_event_loop()
swap, sequence, gate, result, tasks = loop.run_until_complete(start())

async def expect(call):
    try:
        await call
    except ClosedError as error:
        assert "fork of the one that opened" in str(error), error
        return 1
    return 0

async def all_of():
    return [await expect(task) for task in tasks]

sys.stdout.flush()
if not os.fork():
    signal.alarm(20)
    assert loop.run_until_complete(all_of()) == [1] * 5
    assert asyncio.run(expect(result.done())) == 1
    refused(result.synchronize)
    refused(swap.stream_of(None).synchronize)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.wait()[1]) == 0
gate.set()

async def end():
    for task in tasks[:4]:
        await task
    await (await tasks[4]).done()
    assert await sequence.commit(rows) == 496
    await swap.close()

loop.run_until_complete(end())
loop.close()
"""

LOCK = """
# The parent is killed, the child lives on: the directory is free.
reading, writing = os.pipe()
held, holding = os.pipe()
if not (parent := os.fork()):
    swap = hsswap.blocking(config)
    if not os.fork():
        os.close(holding)
        signal.alarm(20)
        os.read(held, 1)
        os._exit(0)
    os.write(writing, b"1")
    signal.pause()
assert os.read(reading, 1) == b"1"
os.kill(parent, signal.SIGKILL)
os.wait()
with hsswap.blocking(config) as swap:
    swap.sequence()
os.write(holding, b"1")
"""


@pytest.mark.parametrize("io", ["posix", "uring"])
@pytest.mark.parametrize(
    "body",
    [BLOCKING, BUSY, AWAITED, PENDING, LOCK],
    ids=["blocking", "busy", "awaited", "pending", "lock"],
)
def test_a_fork_beside_an_open_swap(body: str, io: str, tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", BEGIN + body, str(tmp_path / "store"), io],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=PROJECT,
        env=ENVIRONMENT,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr == ""
