"""BlockStore: a fault gives the right bytes or a typed error for exactly the block it hit."""

from __future__ import annotations

import asyncio
import errno
import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hsswap.errors import (
    CorruptBlock,
    HsswapError,
    OutOfSpace,
    StaleBlockId,
)
from hsswap.io import BlockStore
from hsswap.io.directory import segment_name
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.io.support import (
    BLOCK,
    DIMS,
    fresh,
    memory_store,
    pattern,
    read,
    write,
)


async def test_blocks_without_content_are_errors_of_those_blocks(store: BlockStore) -> None:
    ids = store.ids.allocate(4)
    indices = store.ids.check(ids)
    content = pattern(4, BLOCK, 1)
    await write(store, 0, indices[:3], content[:3])
    store.ids.drop_reference(ids[1:2])
    found, outcome = await read(store, 0, indices)
    assert np.array_equal(found[[0, 2]], content[[0, 2]])
    assert {position: type(error) for position, error in outcome.errors.items()} == {
        1: StaleBlockId,
        3: CorruptBlock,
    }
    assert f"layer 0, block id {ids[3]}" in str(outcome.errors[3])
    refused = await write(store, 0, indices[1:2], content[1:2])
    assert isinstance(refused.errors[0], StaleBlockId)


async def test_an_earlier_owners_bytes_are_never_served(store: BlockStore) -> None:
    ids = store.ids.allocate(1)
    indices = store.ids.check(ids)
    keep = fresh(store, 1)  # the segment stays
    await write(store, 0, indices, pattern(1, BLOCK, 1))
    await write(store, 0, keep, pattern(1, BLOCK, 2))
    store.ids.drop_reference(ids)
    new = store.ids.allocate(600 - 1)
    assert int(indices[0]) in store.ids.check(new)
    _, outcome = await read(store, 0, indices)
    assert isinstance(outcome.errors[0], CorruptBlock)


async def test_exactly_the_block_with_the_flipped_bit(tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path, 300, io="posix") as store:
        indices = fresh(store, 40)
        content = pattern(40, BLOCK, 1)
        await write(store, 1, indices, content)
        with (tmp_path / segment_name(0)).open("r+b") as file:
            offset = 256 * BLOCK + 17 * BLOCK + 100
            file.seek(offset)
            byte = file.read(1)
            file.seek(offset)
            file.write(bytes([byte[0] ^ 1]))
        found, outcome = await read(store, 1, indices)
        good = [number for number in range(40) if number != 17]
        assert np.array_equal(found[good], content[good])
        assert set(outcome.errors) == {17}
        assert isinstance(outcome.errors[17], CorruptBlock)
        assert "layer 1, block id" in str(outcome.errors[17])
        assert store.statistics().checksum_failures == 1


async def test_exchanged_blocks_are_found(tmp_path: Path) -> None:
    async with await BlockStore.open(DIMS, tmp_path, 300, io="posix") as store:
        indices = fresh(store, 2)
        await write(store, 0, indices, pattern(2, BLOCK, 1))
        path = tmp_path / segment_name(0)
        whole = bytearray(path.read_bytes())
        whole[:BLOCK], whole[BLOCK : 2 * BLOCK] = whole[BLOCK : 2 * BLOCK], whole[:BLOCK]
        path.write_bytes(whole)
        _, outcome = await read(store, 0, indices)
        assert [type(outcome.errors[n]) for n in (0, 1)] == [CorruptBlock, CorruptBlock]


async def workload(io: MemoryIO) -> list[list[int]]:
    """Write, read, write again, free, and write and read what comes next in the freed place.

    Checks that no wrong byte is served. Returns the positions that failed, call by call.
    """
    failed: list[list[int]] = []
    async with await BlockStore.open(DIMS, None, 300, io=io) as store:
        truth: dict[tuple[int, int], Any] = {}
        seeds = itertools.count(1)

        async def put(layer: int, indices: Any) -> None:
            content = pattern(len(indices), store.block_bytes(layer), next(seeds))
            outcome = await write(store, layer, indices, content)
            for position, index in enumerate(indices.tolist()):
                truth[layer, index] = None if position in outcome.errors else content[position]
            failed.append(sorted(outcome.errors))

        async def get(layer: int, indices: Any) -> None:
            found, outcome = await read(store, layer, indices)
            for position, index in enumerate(indices.tolist()):
                if position not in outcome.errors:
                    assert np.array_equal(found[position], truth[layer, index])
            assert all(isinstance(error, HsswapError) for error in outcome.errors.values())
            failed.append(sorted(outcome.errors))

        ids = store.ids.allocate(24)
        indices = store.ids.check(ids)
        for layer in range(DIMS.layers):
            await put(layer, indices)
        await get(0, indices[::-1])
        await get(2, indices[[0, 5, 6, 7, 20]])
        await put(1, indices[4:9])
        await get(1, indices)
        store.ids.drop_reference(ids)
        await asyncio.sleep(0)
        again = fresh(store, 10)
        await put(0, again)
        await get(0, again)
    assert store.statistics().in_flight == 0
    return failed


async def test_the_workload_without_faults() -> None:
    io = MemoryIO()
    assert not any(await workload(io))
    assert io.operations.count("create") == 2
    assert io.operations.count("remove") == 1


KINDS = [FaultKind.ERRNO, FaultKind.SHORT, FaultKind.TORN, FaultKind.FLIP]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_fault_at_every_operation(kind: FaultKind) -> None:
    clean = MemoryIO()
    await workload(clean)
    for number, operation in enumerate(clean.operations):
        io = MemoryIO([Fault(kind, at=number, errno=errno.EIO, bit=8 * 3000 + 3)])
        failed = await workload(io)  # which checks that no wrong byte is served
        told_here = {"create": 24, "remove": 0, "read": 1, "write": 1}[operation]
        if kind in (FaultKind.ERRNO, FaultKind.SHORT):
            # A failed run is repaired by trying its blocks alone. A block without a file, and the
            # single block of a run of one, is told; and then it has no content.
            assert all(len(blocks) <= told_here for blocks in failed), (number, operation, failed)
        elif operation in ("create", "remove"):
            assert not any(failed)
        elif kind is FaultKind.FLIP:
            # Of a read: the one block, once. Of a write: at each read of the block until it is
            # written again.
            assert all(len(blocks) <= 1 for blocks in failed)
            assert sum(map(len, failed)) == 1 or operation == "write"
        else:
            assert sum(map(len, failed)) >= 1 or operation == "write"
        assert io.statistics().in_flight == 0


@pytest.mark.parametrize("operation", ["read", "write"])
@pytest.mark.parametrize("block", [0, 5, 11])
async def test_a_bad_spot_is_the_error_of_its_block_alone(operation: str, block: int) -> None:
    spot = (block * BLOCK + 9, block * BLOCK + 10)
    async with await memory_store(
        Fault(FaultKind.ERRNO, only=operation, count=None, offsets=spot)
    ) as store:
        indices = fresh(store, 12)
        content = pattern(12, BLOCK, 1)
        writing = await write(store, 0, indices, content)
        found, reading = await read(store, 0, indices)
        assert set(reading.errors) == {block}
        assert set(writing.errors) == ({block} if operation == "write" else set())
        good = [number for number in range(12) if number != block]
        assert np.array_equal(found[good], content[good])
        named = writing if operation == "write" else reading
        assert "layer 0, block id" in str(named.errors[block])


async def test_out_of_space_then_space() -> None:
    fault = Fault(FaultKind.ERRNO, at=0, errno=errno.ENOSPC)
    async with await memory_store(fault) as store:
        indices = fresh(store, 3)
        content = pattern(3, BLOCK, 1)
        outcome = await write(store, 0, indices, content)
        assert [type(outcome.errors[number]) for number in range(3)] == [OutOfSpace] * 3
        assert [len(positions) for positions, _ in outcome.reports] == [1, 1, 1]
        assert not (await write(store, 0, indices, content)).errors
        found, _ = await read(store, 0, indices)
        assert np.array_equal(found, content)
