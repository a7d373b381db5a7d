"""Buffers of a burst, their drain, and tables of lengths."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import numpy as np
import pytest

from hsswap.driver.base import Device
from hsswap.driver.round_operations import NO_TOKEN, CopyWork, RollbackWork, SetWork
from hsswap.errors import ArgumentError, DeviceError
from hsswap.rounds import (
    LayerLengths,
    SequenceStart,
    StreamBufs,
    kv_len_ptr_table,
    kv_len_ptr_table_range,
)
from tests.driver.conftest import device, rig
from tests.driver.rig import Rig

__all__ = ["device", "rig"]


@pytest.fixture
def bufs(device: Device) -> Iterator[StreamBufs]:
    """Two sequences, two rounds of three drafts."""
    with StreamBufs(device, 3, 2, batch=2, history_tokens=6, stops=2) as made:
        yield made


STARTS = [SequenceStart([4, 5], 6, 9), SequenceStart([7], None, 3, last_pred=8)]


def test_shapes_are_those_of_the_source(bufs: StreamBufs) -> None:
    """StreamBufs of the original, with a batch in front."""
    shapes = {
        "vtok": (2, 4),
        "brk": (2, 2),
        "pend": (2,),
        "last_pred": (2,),
        "acc": (2, 2),
        "pos_ctr": (2,),
        "pos_start": (2,),
        "ring": (2, 2 * (3 + 1) + 1),
    }
    for name, shape in shapes.items():
        tensor = getattr(bufs, name)
        assert tensor.shape == shape
        assert tensor.dtype == ("i32" if name.startswith("pos") else "u32")
    assert (bufs.m_rounds, bufs.k) == (2, 3)


async def test_start_and_drain(rig: Rig, bufs: StreamBufs) -> None:
    """What start sets is what a drain reads; a ring is emptied by begin, not by the drain."""
    kernels = rig.device.round_kernels()
    await bufs.start(rig.stream, STARTS, [1])
    bufs.begin(rig.stream)
    for index, value in enumerate((2, 11, 12)):
        kernels.set_word(rig.stream, SetWork(bufs.ring, index, value))
    drained = await bufs.drain_ring(bufs.publish(rig.stream))
    assert drained.tokens == [[11, 12], [11, 12]]
    assert drained.positions == [2, 1]
    assert drained.pending == [6, NO_TOKEN]
    assert drained.flags == [0, 0]
    bufs.begin(rig.stream)
    assert (await bufs.drain_ring(bufs.publish(rig.stream))).tokens == [[], []]
    copies = {
        name: rig.tensor(np.full(tensor.shape, 9, np.int32 if tensor.dtype == "i32" else np.uint32))
        for name in ("history", "stop_tokens", "depth", "capacity", "last_pred")
        if (tensor := getattr(bufs, name))
    }
    for name, copy in copies.items():
        kernels.copy_add(rig.stream, CopyWork(getattr(bufs, name), copy))
    rig.stream.synchronize()
    assert copies["history"].array().tolist() == [[4, 5, 6, 0, 0, 0], [7, 0, 0, 0, 0, 0]]
    assert copies["stop_tokens"].array().tolist() == [[1, NO_TOKEN]] * 2
    assert copies["depth"].array().tolist() == [[3], [3]]
    assert copies["capacity"].array().tolist() == [9, 3]
    assert copies["last_pred"].array().tolist() == [0, 8]


async def test_two_bursts_at_most_wait(rig: Rig, bufs: StreamBufs) -> None:
    """Each has its own outbox; a cancelled drain keeps it."""
    kernels = rig.device.round_kernels()
    published = []
    for token in (21, 22):
        kernels.set_word(rig.stream, SetWork(bufs.ring, 0, 1))
        kernels.set_word(rig.stream, SetWork(bufs.ring, 1, token))
        published.append(bufs.publish(rig.stream))
    with pytest.raises(DeviceError, match="drain"):
        bufs.publish(rig.stream)
    task = asyncio.create_task(bufs.drain_ring(published[1]))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for expected, burst in zip((21, 22), published, strict=True):
        assert (await bufs.drain_ring(burst)).tokens[0] == [expected]
    await bufs.drain_ring(bufs.publish(rig.stream))


async def test_a_ring_that_overflowed_unseen_is_told(rig: Rig, bufs: StreamBufs) -> None:
    """A count past the ring's end is no count of ours."""
    rig.device.round_kernels().set_word(rig.stream, SetWork(bufs.ring, 0, 9))
    with pytest.raises(DeviceError, match="ring"):
        await bufs.drain_ring(bufs.publish(rig.stream))


async def test_refused_starts(rig: Rig, bufs: StreamBufs) -> None:
    """Histories, stop tokens and batches that do not fit."""
    with pytest.raises(ArgumentError, match="history"):
        await bufs.start(rig.stream, [SequenceStart(range(7), None, 9), STARTS[1]])
    with pytest.raises(ArgumentError, match="stop"):
        await bufs.start(rig.stream, STARTS, [1, 2, 3])
    with pytest.raises(ArgumentError, match="batch"):
        await bufs.start(rig.stream, STARTS[:1])


def test_tables_of_lengths(rig: Rig) -> None:
    """Every layer's own counter and the position move; a layer without one is skipped, and those of
    another stage are not in the table.
    """
    with LayerLengths(rig.device, [True, False, True, True], batch=2) as lengths:
        counters = [t for t in lengths.of_layer if t is not None]
        kernels, words = rig.device.round_kernels(), rig.tensor(np.zeros((2, 2), np.uint32))
        words.array()[:] = [[2, 1], [0, 0]]  # as acc and as brk: 3 and 0 rows committed
        pos_start = rig.tensor(np.array([10, 20], np.int32))
        pos_ctr = rig.tensor(np.array([-1, -1], np.int32))
        out = rig.tensor(np.zeros((3, 2), np.int32))

        def after(layers: range | None) -> list[list[int]]:
            if layers is None:
                table = kv_len_ptr_table(rig.device, lengths, pos_ctr)
            else:
                table = kv_len_ptr_table_range(rig.device, lengths, layers)
            with table:
                work = RollbackWork(table.pointers, pos_start, words, words)
                kernels.spec_rollback_stream(rig.stream, work)
                for row, counter in enumerate(counters):
                    kernels.copy_add(rig.stream, CopyWork(counter, out.row(row)))
                rig.stream.synchronize()
                shown: list[list[int]] = out.array().tolist()
                return [*shown, list(table.pointers.shape)]

        assert after(range(2, 3)) == [[0, 0], [13, 20], [0, 0], [2, 1]]
        assert pos_ctr.array().tolist() == [-1, -1]
        pos_start.array()[:] = [30, 40]
        assert after(None) == [[33, 40]] * 3 + [[2, 5]]
        assert pos_ctr.array().tolist() == [33, 40]
        assert after(range(1, 2)) == [[33, 40]] * 3 + [[2, 1]]


def test_refused_tables(rig: Rig) -> None:
    """Layers that are not there, a counter of another batch, no layer at all."""
    with LayerLengths(rig.device, [True, True], batch=2) as lengths:
        for layers in (range(3), range(0, 2, 2), range(-1, 1), range(2, 1)):
            with pytest.raises(ArgumentError, match="layers"):
                kv_len_ptr_table_range(rig.device, lengths, layers)
        with pytest.raises(ArgumentError, match="counter"):
            kv_len_ptr_table(rig.device, lengths, rig.tensor(np.zeros(3, np.int32)))
    with pytest.raises(ArgumentError, match="layers"):
        LayerLengths(rig.device, [])
