"""What takes turns in ``hsswap bench io``, each alone: reads to a device, sequences, the lag."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import numpy as np
import pytest

from hsswap.bench import lag
from hsswap.bench.io_arms import BenchError, FilledStore
from hsswap.bench.io_device import DeviceArm
from hsswap.bench.io_turns import TILE_BLOCKS, append_in_turns, compare_turns
from hsswap.bench.lag import PERIOD_S, LoopLag
from hsswap.driver import open_device
from hsswap.io.ids import EXTENT_IDS, BlockIds

KIB = 1024


@pytest.mark.parametrize("direct", [False, True])
async def test_reads_to_a_device_are_verified_and_counted(direct: bool, tmp_path: Path) -> None:
    filled = await FilledStore.make("posix", tmp_path / "store", 12 * KIB, 32)
    with open_device("host") as device:
        before = device.live_count
        arm = DeviceArm(filled, 8, device, direct=direct)
        await arm.verify()
        taken = await arm.slice(0.01)
        assert taken.operations >= 8
        assert filled.store.statistics().blocks_read == 32 + 8 + 8 + taken.operations
        assert arm.destination == "device host"
        await arm.close()
        assert device.live_count == before
    await filled.store.close()


@pytest.mark.parametrize("direct", [False, True])
async def test_wrong_bytes_on_a_device_are_told(direct: bool, tmp_path: Path) -> None:
    filled = await FilledStore.make("posix", tmp_path / "store", 12 * KIB, 32)
    with open_device("host") as device:
        arm = DeviceArm(filled, 8, device, direct=direct)
        content = arm._there.content

        def flipped() -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
            found = content()
            found[3, 5] ^= 1
            return found

        arm._there.content = flipped  # type: ignore[method-assign]
        with pytest.raises(BenchError, match="came to device host wrong"):
            await arm.verify()
        await arm.close()
    await filled.store.close()


def test_sequences_that_grow_in_turns_have_extents_of_their_own() -> None:
    sequences = append_in_turns(BlockIds(1024), 3, 40)
    assert len(np.unique(np.concatenate(sequences))) == 120
    for indices in sequences:
        (breaks,) = np.nonzero(np.diff(indices) != 1)
        assert len(breaks) > 0
        assert ((breaks + 1) % EXTENT_IDS == 0).all()


async def test_sequences_are_compared_with_one_alone(tmp_path: Path) -> None:
    row = await compare_turns("posix", tmp_path / "turns", 4 * KIB, 1, 20, 0.001)
    assert row["blocks_each"] == 2 * TILE_BLOCKS
    low, high = row["of_one_alone"][1:]
    assert 0 < low <= row["of_one_alone"][0] <= high


async def test_the_lag_is_that_of_every_period_also_of_those_slept_through(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = time.monotonic()
    monkeypatch.setattr(lag.time, "monotonic", lambda: now)
    with LoopLag() as watch:
        while not watch.lags:  # the kernel's clock goes on
            await asyncio.sleep(0)
        first = len(watch.lags)
        assert watch.lags == pytest.approx([-PERIOD_S * n for n in range(1, first + 1)])
    assert watch._due == pytest.approx(now + (first + 1) * PERIOD_S)
