"""HighSpeedSwap when things go wrong: bad input, faults, cancellation, closing."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsswap import HighSpeedSwap, Sequence, SwapConfig
from hsswap.config import PredictorConfig
from hsswap.driver import open_device
from hsswap.errors import (
    ArgumentError,
    BlockIOError,
    ClosedError,
    ConfigError,
    CorruptBlock,
    HsswapError,
    OutOfBlocks,
    OutOfSlots,
    OutOfSpace,
)
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from hsswap.topk import TopK
from tests.swap_cases import SMALL, Case, chunks_of, config_for, feed, random_case, run

TOKENS = 800


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, TOKENS, seed=21)


@asynccontextmanager
async def opened(
    config: SwapConfig, *faults: Fault
) -> AsyncIterator[tuple[HighSpeedSwap, Sequence]]:
    """A swap over the memory backend and one sequence; nothing may be left of either."""
    device = open_device("host")
    async with HighSpeedSwap.open(config, io=MemoryIO(faults), device=device) as swap:
        sequence = swap.sequence()
        yield swap, sequence
        await sequence.close()
        statistics = swap.statistics()
        assert statistics.host_slots_used == 0
        assert statistics.free_blocks == config.capacity_blocks
        for pool in {id(p): p for p in map(swap.pool_of, range(SMALL.layers))}.values():
            pool.tier.check()
    assert device.live_count == 0


def last_row(case: Case, layer: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    return case.queries[layer][-1:]


BAD_APPENDS: list[tuple[Callable[[Case], tuple[Any, Any, Any]], str]] = [
    (lambda c: (3, c.keys[0], c.values[0]), "layer is 3"),
    (lambda c: (-1, c.keys[0], c.values[0]), "layer is -1"),
    (lambda c: ("0", c.keys[0], c.values[0]), "layer is '0'"),
    (lambda c: (0, c.keys[0].astype(np.float32), c.values[0]), "keys has dtype float32"),
    (lambda c: (0, c.keys[0][:, :1], c.values[0]), "keys has shape"),
    (lambda c: (0, c.keys[0], c.values[0][:-1]), "values has shape"),
    (lambda c: (0, c.keys[0][:0], c.values[0][:0]), "1 row or more"),
    (lambda c: (0, c.keys[0].tolist(), c.values[0]), "keys is a list; give an array"),
    (lambda c: (0, None, None), "keys is a NoneType"),
]


@pytest.mark.parametrize(("make", "words"), BAD_APPENDS)
async def test_bad_appends_change_nothing(
    case: Case, make: Callable[[Case], tuple[Any, Any, Any]], words: str
) -> None:
    async with opened(config_for(case)) as (swap, sequence):
        before = swap.statistics()
        with pytest.raises(ArgumentError, match=words):
            await sequence.append(*make(case))
        with pytest.raises(ArgumentError, match=words):
            sequence.try_append(*make(case))
        assert swap.statistics() == before
        assert sequence.length == 0


async def test_bad_attends_change_nothing(case: Case) -> None:
    async with opened(config_for(case)) as (_, sequence):
        await sequence.append(0, case.keys[0][:5], case.values[0][:5])
        bad: list[tuple[tuple[Any, ...], str]] = [
            ((0, case.queries[0][:6]), "6 query rows for layer 0, which has 5 tokens"),
            ((1, case.queries[1][:1]), "which has 0 tokens"),
            ((0, case.queries[0][:1, :2]), "queries has shape"),
            ((0, case.queries[0][:1].astype(np.int32)), "queries has dtype"),
            ((0, case.queries[0][:1], np.zeros((1, 6, 16), np.float32)), "out has dtype"),
            ((0, case.queries[0][:1], np.zeros((2, 6, 16), np.uint16)), "out has shape"),
            ((7, case.queries[0][:1]), "layer is 7"),
        ]
        frozen = np.zeros((1, 6, 16), np.uint16)
        frozen.flags.writeable = False
        bad.append(((0, case.queries[0][:1], frozen), "out is read-only"))
        for arguments, words in bad:
            with pytest.raises(ArgumentError, match=words):
                await sequence.attend(*arguments)
            with pytest.raises(ArgumentError, match=words):
                sequence.try_attend(*arguments)


async def test_overlapping_calls_of_one_sequence_are_refused(case: Case) -> None:
    gate = Fault(FaultKind.HOLD, only="read")
    async with opened(config_for(case), gate) as (swap, sequence):
        await feed(sequence, case, [64])
        await fill(sequence, case)
        attending = asyncio.ensure_future(sequence.attend(0, last_row(case, 0)))
        await asyncio.to_thread(gate.gate.reached.wait)
        with pytest.raises(ArgumentError, match="attend of the same sequence is running"):
            await sequence.append(0, case.keys[0][:1], case.values[0][:1])
        with pytest.raises(ArgumentError, match="close"):
            await sequence.close()
        gate.gate.opened.set()
        await (await attending).done()
        assert swap.statistics().misses > 0


async def fill(sequence: Sequence, case: Case) -> None:
    """Append what is missing of every layer, without attending."""
    for layer in range(case.dims.layers):
        start = sequence.layer_length(layer)
        await sequence.append(layer, case.keys[layer][start:], case.values[layer][start:])


async def test_more_sequences_than_slots_serve(case: Case) -> None:
    async with opened(config_for(case)) as (swap, _):
        with pytest.raises(
            OutOfSlots, match=r"max_sequences is 1 and as many are open.*3 device slots"
        ):
            swap.sequence()
    with_codes = replace(config_for(case), predictor=PredictorConfig())
    async with HighSpeedSwap.open(with_codes, io=MemoryIO()) as swap:
        for _ in range(2):  # the second time shows that the first took nothing
            with pytest.raises(OutOfSlots, match=r"needs 209 device slots and \d+ are free"):
                swap.sequence(top_k=TopK(100))
        await swap.sequence().close()


async def test_top_k_needs_a_predictor(case: Case) -> None:
    config = replace(config_for(case), predictor=None)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        with pytest.raises(ConfigError, match="predictor"):
            swap.sequence(top_k=TopK(4))
        with pytest.raises(ArgumentError, match=r"top_k is 4; give hsswap.TopK"):
            swap.sequence(top_k=4)  # type: ignore[arg-type]


async def test_a_full_store_refuses_and_goes_on(case: Case) -> None:
    config = config_for(case, capacity=320)
    async with opened(config) as (_, sequence):
        await feed(sequence, case, [300])
        with pytest.raises(OutOfBlocks):
            await sequence.append(0, case.keys[0][300:400], case.values[0][300:400])
        assert sequence.layer_length(0) == 300
        await sequence.append(0, case.keys[0][300:320], case.values[0][300:320])
        assert sequence.layer_length(0) == 320


async def test_a_block_that_cannot_be_read_fails_that_attend_only(case: Case) -> None:
    wanted = await run(case, config_for(case), [TOKENS])
    block = Fault(FaultKind.ERRNO, count=2, only="read", offsets=(4096 * 40, 4096 * 41))
    async with opened(config_for(case), block) as (_, sequence):
        await fill(sequence, case)
        with pytest.raises(BlockIOError, match="layer 0") as caught:
            await sequence.attend(0, case.queries[0])
        assert caught.value.errno == errno.EIO
        result = await sequence.attend(0, case.queries[0])  # the drive answers again
        await result.done()
        assert isinstance(result.out, np.ndarray)
        assert (result.out == wanted[0]).all()


async def test_a_flipped_bit_is_an_error_never_an_answer(case: Case) -> None:
    flip = Fault(FaultKind.FLIP, count=None, only="read", offsets=(4096 * 44, 4096 * 45), bit=77)
    async with opened(config_for(case), flip) as (_, sequence):
        await fill(sequence, case)
        for _ in range(2):
            with pytest.raises(CorruptBlock, match="layer 0"):
                await sequence.attend(0, case.queries[0])
        await (await sequence.attend(1, case.queries[1])).done()  # the other layers are fine


async def test_a_full_disk_keeps_blocks_in_memory_and_flush_tells(case: Case) -> None:
    full = Fault(FaultKind.ERRNO, count=40, errno=errno.ENOSPC, only="write")
    wanted = await run(case, config_for(case, extra_host=200), [TOKENS])
    async with opened(config_for(case, extra_host=200), full) as (swap, sequence):
        await feed(sequence, case, [64])
        with pytest.raises(OutOfSpace):
            await swap.flush()
        assert swap.statistics().write_errors > 0
        await fill(sequence, case)
        result = await sequence.attend(2, case.queries[2])
        await result.done()
        assert isinstance(result.out, np.ndarray)
        assert (result.out == wanted[2]).all()
        for _ in range(5):  # until there is room again
            with suppress(OutOfSpace):
                await swap.flush()
        await swap.flush()


@pytest.mark.parametrize("again", [True, False])
async def test_a_flush_waits_for_what_another_flush_tries_again(case: Case, again: bool) -> None:
    """A block in neither list, of what moves and of what failed, was taken for one on disk."""
    gates = Gate(), Gate()
    held = [Fault(FaultKind.HOLD, at=n, only="write", gate=gate) for n, gate in enumerate(gates)]
    full = Fault(FaultKind.ERRNO, count=2 if again else 1, errno=errno.ENOSPC, only="write")
    async with opened(config_for(case, extra_host=200), *held, full) as (swap, sequence):
        await sequence.append(0, case.keys[0][:16], case.values[0][:16])
        flushes = [asyncio.ensure_future(swap.flush()) for _ in range(3)]
        try:
            for gate in gates:
                assert await asyncio.to_thread(gate.reached.wait, 30)
                for _ in range(100):
                    await asyncio.sleep(0)
                assert not any(flush.done() for flush in flushes)
                gate.opened.set()
        finally:
            for gate in gates:
                gate.opened.set()
        ends = await asyncio.gather(*flushes, return_exceptions=True)
        # Each flush tries it once more: the second writes what the first could not.
        assert [isinstance(end, OutOfSpace) for end in ends] == [again, False, False]
        assert swap.store_statistics().blocks_written == 1


async def test_a_disk_that_stays_full_is_an_error_not_a_hang(case: Case) -> None:
    full = Fault(FaultKind.ERRNO, count=None, errno=errno.ENOSPC, only="write")
    async with opened(config_for(case), full) as (_, sequence):
        with pytest.raises(OutOfSpace):
            await feed(sequence, case, chunks_of(TOKENS, 100))


async def test_closing_ends_what_waits(case: Case) -> None:
    never = Fault(FaultKind.NEVER, only="read")
    device = open_device("host")
    swap = await HighSpeedSwap.create(config_for(case), io=MemoryIO([never]), device=device)
    sequence = swap.sequence()
    await fill(sequence, case)
    attending = asyncio.ensure_future(sequence.attend(0, last_row(case, 0)))
    for _ in range(1000):
        if "reading=0" not in repr(swap.prefetcher):
            break
        await asyncio.sleep(0)
    assert not attending.done()
    await swap.close()
    with pytest.raises(HsswapError):
        await attending
    assert device.live_count == 0
    await swap.close()  # twice is fine


async def test_closed_things_say_so(case: Case) -> None:
    async with HighSpeedSwap.open(config_for(case), io=MemoryIO()) as swap:
        sequence = swap.sequence()
        await sequence.close()
        await sequence.close()
        with pytest.raises(ClosedError):
            await sequence.append(0, case.keys[0], case.values[0])
        sequence = swap.sequence()
    calls: list[Callable[[], Awaitable[object]]] = [
        lambda: sequence.append(0, case.keys[0], case.values[0]),
        lambda: sequence.attend(0, case.queries[0]),
        swap.flush,
    ]
    for call in calls:
        with pytest.raises(ClosedError):
            await call()
    with pytest.raises(ClosedError):
        swap.sequence()
    await sequence.close()


@pytest.mark.parametrize("steps", range(0, 40, 3))
async def test_cancellation_at_any_step_leaks_nothing(case: Case, steps: int) -> None:
    """Cancel an attend after it ran ``steps`` turns of the loop; then everything still works."""
    wanted = await run(case, config_for(case), [TOKENS])
    async with opened(config_for(case)) as (_, sequence):
        await fill(sequence, case)
        attending = asyncio.ensure_future(sequence.attend(0, case.queries[0]))
        for _ in range(steps):
            await asyncio.sleep(0)
        attending.cancel()
        with suppress(asyncio.CancelledError):
            await (await attending).done()
        for layer in range(3):
            result = await sequence.attend(layer, case.queries[layer])
            await result.done()
            assert isinstance(result.out, np.ndarray)
            assert (result.out == wanted[layer]).all()


async def test_cancelled_while_waiting_for_slots(case: Case) -> None:
    """Two sequences want more host slots than there are; one gives up in the queue."""
    gate = Fault(FaultKind.HOLD, only="read")
    config = config_for(case, sequences=3)
    async with HighSpeedSwap.open(config, io=MemoryIO([gate])) as swap:
        sequences = [swap.sequence() for _ in range(3)]
        for sequence in sequences:
            await fill(sequence, case)
        await swap.flush()
        tasks = [
            asyncio.ensure_future(sequence.attend(0, last_row(case, 0))) for sequence in sequences
        ]
        await asyncio.to_thread(gate.gate.reached.wait)
        for _ in range(5):
            await asyncio.sleep(0)
        tasks[2].cancel()
        gate.gate.opened.set()
        outputs = [await task for task in tasks[:2]]
        for result in outputs:
            await result.done()
        assert (np.asarray(outputs[0].out) == np.asarray(outputs[1].out)).all()
        with pytest.raises(asyncio.CancelledError):
            await tasks[2]
        for sequence in sequences:
            await sequence.close()
        assert swap.statistics().host_slots_used == 0


@pytest.mark.parametrize("at", range(0, 60, 7))
@pytest.mark.parametrize("kind", [FaultKind.ERRNO, FaultKind.SHORT, FaultKind.FLIP, FaultKind.TORN])
async def test_any_single_fault_gives_right_bytes_or_a_typed_error(
    case: Case, kind: FaultKind, at: int
) -> None:
    wanted = await run(case, config_for(case), [TOKENS])
    async with opened(config_for(case), Fault(kind, at=at)) as (swap, sequence):
        try:
            await fill(sequence, case)
        except HsswapError:
            return
        for layer in range(3):
            try:
                result = await sequence.attend(layer, case.queries[layer])
            except HsswapError:
                continue
            await result.done()
            assert (np.asarray(result.out) == wanted[layer]).all()
        with suppress(BlockIOError):
            await swap.flush()
