"""Gathers of whole blocks, which the copy engine may take, and of many units."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.config import LayerGroup
from hsswap.driver.cuda_operations import block_runs
from hsswap.driver.operations import GatherWork
from hsswap.errors import ArgumentError
from tests.driver.rig import Rig
from tests.driver.test_operations import content


def test_gather_of_more_than_is_copied_at_a_time(rig: Rig) -> None:
    group = LayerGroup(1, 2, 2, 256)
    units, blocks = rig.units(group, 16, 160), rig.blocks(group, 16, 80)
    blocks.memory.array()[...] = np.arange(80, dtype=np.uint8)[:, None]
    order = np.random.default_rng(0).permutation(160).astype(np.int32)
    work = GatherWork(blocks, units, order // 2, order % 2, np.arange(160, dtype=np.int32))
    rig.device.gather(rig.stream, work)
    rig.stream.synchronize()
    wanted = np.broadcast_to((order // 2)[:, None], units.memory.shape)
    np.testing.assert_array_equal(content(units), wanted)


def whole_blocks(rig: Rig, host_slots: list[int], block_slots: list[int]) -> GatherWork:
    """Blocks of 64 KiB."""
    group = LayerGroup(1, 8, 8, 128)
    units, blocks = rig.units(group, 16, 64 * 8 + 3), rig.blocks(group, 16, 64)
    blocks.memory.array().view(np.uint32)[...] = np.arange(1 << 20, dtype=np.uint32).reshape(64, -1)
    i32 = [np.array(slots, np.int32) for slots in (host_slots, block_slots)]
    return GatherWork(blocks, units, i32[0], None, i32[1])


@pytest.mark.parametrize(
    ("host_slots", "block_slots"),
    [
        ([*range(5, 33)], [*range(28)]),
        ([*range(40, 56), *range(3, 19)], [*range(2, 34)]),
        ([*range(20), *range(20, 40)], [*range(30, 50), *range(20)]),
        ([63 - i for i in range(20)], [*range(20)]),
        ([7], [9]),
        ([], []),
    ],
    ids=["one run", "host in two runs", "device in two runs", "backwards", "one block", "none"],
)
def test_gather_of_whole_blocks(rig: Rig, host_slots: list[int], block_slots: list[int]) -> None:
    work = whole_blocks(rig, host_slots, block_slots)
    source, wanted = content(work.blocks), content(work.units)
    wanted[: 64 * 8].reshape(64, -1)[block_slots] = source[host_slots]
    rig.device.gather(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(work.units), wanted)
    np.testing.assert_array_equal(content(work.blocks), source)


def test_gather_of_many_units_in_any_order(rig: Rig) -> None:
    """As many bytes as the copy engine takes, but not whole blocks one behind the other."""
    whole = whole_blocks(rig, [*range(40)], [*range(3, 43)])
    work = whole.by_unit()
    assert work.heads is not None
    order = np.random.default_rng(5).permutation(len(work.heads))
    lists = (work.host_slots[order], work.heads[order], work.device_slots[order])
    source, wanted = content(work.blocks), content(work.units)
    wanted[: 64 * 8].reshape(64, -1)[3:43] = source[:40]
    rig.device.gather(rig.stream, GatherWork(work.blocks, work.units, *lists))
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(work.units), wanted)


def test_gather_of_blocks_with_padding(rig: Rig) -> None:
    units, blocks = (
        rig.units(LayerGroup(1, 3, 3, 24), 16, 11),
        rig.blocks(LayerGroup(1, 3, 3, 24), 16, 4),
    )
    blocks.memory.array()[...] = np.random.default_rng(1).integers(0, 256, blocks.memory.shape)
    work = GatherWork(blocks, units, np.array([3, 1], np.int32), None, np.array([0, 2], np.int32))
    assert block_runs(work, 0) == []
    wanted, whole = content(units), content(blocks)[:, : 3 * units.unit_bytes]
    wanted[:9].reshape(3, -1)[[0, 2]] = whole[[3, 1]]
    rig.device.gather(rig.stream, work)
    rig.stream.synchronize()
    np.testing.assert_array_equal(content(units), wanted)


def test_gather_refuses_blocks_that_are_not_there(rig: Rig) -> None:
    for host_slots, block_slots in (([64], [0]), ([0], [64]), ([0, 1], [0]), ([-1], [0])):
        with pytest.raises(ArgumentError):
            rig.device.gather(rig.stream, whole_blocks(rig, host_slots, block_slots))


def test_runs_of_whole_blocks(rig: Rig) -> None:
    work = whole_blocks(rig, [4, 5, 6, 9, 10, 3], [7, 8, 9, 10, 12, 13])
    assert block_runs(work, 0) == [(4, 7, 3), (9, 10, 1), (10, 12, 1), (3, 13, 1)]
    assert block_runs(work.by_unit(), 0) == []
    mean_bytes = work.blocks.block_bytes * 6 // 4
    assert len(block_runs(work, mean_bytes)) == 4
    assert block_runs(work, mean_bytes + 1) == []
