"""What takes turns in ``hsswap bench io``, each alone: reads to a device, sequences, the lag."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.bench.io_arms import BenchError, FilledStore, StoreArm
from hsswap.bench.io_device import DeviceArm, DeviceMemory
from hsswap.bench.io_turns import TILE_BLOCKS, append_in_turns, compare_turns
from hsswap.bench.lag import PERIOD_S, LoopLag
from hsswap.driver import open_device
from hsswap.errors import CorruptBlock
from hsswap.io.base import Operation
from hsswap.io.ids import EXTENT_IDS, BlockIds
from tests.io.support import Outcome, until

KIB = 1024


on_device = pytest.mark.parametrize(
    ("io", "name", "direct"),
    [
        ("posix", "host", False),
        ("posix", "host", True),  # the memory of this device is the processor's, too
        pytest.param("posix", "cuda:0", False, marks=pytest.mark.gpu),
        pytest.param("uring", "cuda:0", False, marks=pytest.mark.gpu),
        pytest.param("gds-compat", "cuda:0", True, marks=[pytest.mark.gpu, pytest.mark.gds]),
    ],
)


@on_device
@pytest.mark.parametrize("kib", [12, 256])
async def test_reads_to_a_device_are_verified_and_counted(
    io: str, name: str, direct: bool, kib: int, tmp_path: Path
) -> None:
    filled = await FilledStore.make(io, tmp_path / "store", kib * KIB, 32)
    with open_device(name) as device:
        before = device.live_count
        arm = DeviceArm(filled, 8, device, direct=direct)
        await arm.verify()
        taken = await arm.slice(0.01)
        assert taken.operations >= 8
        slots = 8 if direct else 16
        assert filled.store.statistics().blocks_read == 32 + 2 * slots + taken.operations
        again = await arm.slice(0.01)  # with the same slots
        read = filled.store.statistics().blocks_read
        assert read == 32 + 2 * slots + taken.operations + again.operations
        assert arm.destination == f"device {name}"
        await arm.close()
        assert device.live_count == before
        await filled.store.close()  # kvikio must give memory back while the context is there


@pytest.mark.parametrize("ahead", [False, True])
async def test_a_slot_is_used_again_when_all_the_others_were(ahead: bool, tmp_path: Path) -> None:
    filled = await FilledStore.make("posix", tmp_path / "store", 4 * KIB, 64)
    arm = StoreArm(filled, Operation.READ, 4, ahead=ahead, memory_bytes=1 << 20)
    used: list[int] = []
    read, most = arm._call, 0

    def watched(layer: int, indices: Any, addresses: Any, **others: Any) -> None:
        nonlocal most
        used.extend(addresses.tolist())
        read(layer, indices, addresses, **others)
        most = max(most, filled.store.statistics().in_flight)

    arm._call = watched
    operations = 0
    while operations <= 64:
        operations += (await arm.slice(0.01)).operations
    assert arm.name == ("posix-ahead" if ahead else "posix")
    assert most == (8 if ahead else 4)
    assert operations == len(used)
    # Of 32 slots, 8 taken at most.
    for begin in range(len(used) - 24):
        assert len(set(used[begin : begin + 24])) == 24
    await filled.store.close()


@on_device
async def test_wrong_bytes_on_a_device_are_told(
    io: str, name: str, direct: bool, tmp_path: Path
) -> None:
    filled = await FilledStore.make(io, tmp_path / "store", 12 * KIB, 32)
    with open_device(name) as device:
        arm = DeviceArm(filled, 8, device, direct=direct)
        content = arm._there.content

        def flipped() -> NDArray[np.uint8]:
            found = content()
            found[3, 5] ^= 1
            return found

        arm._there.content = flipped  # type: ignore[method-assign]
        with pytest.raises(BenchError, match=f"came to device {name} wrong"):
            await arm.verify()
        await arm.close()
        await filled.store.close()


@pytest.mark.parametrize("name", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_the_device_finds_the_block_that_is_wrong(name: str, tmp_path: Path) -> None:
    io = "posix" if name == "host" else "gds-compat"
    filled = await FilledStore.make(io, tmp_path / "store", 64 * KIB, 16)
    segment = filled.files()[0]
    with segment.open("r+b") as stream:
        stream.seek(5 * 64 * KIB + 1000)
        byte = stream.read(1)[0]
        stream.seek(5 * 64 * KIB + 1000)
        stream.write(bytes([byte ^ 4]))
        stream.flush()
        os.fsync(stream.fileno())
    with open_device(name) as device:
        there = DeviceMemory(device, filled, 16, direct=True)
        outcome = Outcome(16)
        filled.store.read(
            0, filled.indices, there.addresses, on_done=outcome, checksums=there.checksums
        )
        errors = (await outcome.end()).errors
        assert {at: type(error) for at, error in errors.items()} == {5: CorruptBlock}
        there.close()
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
    stopped = SimpleNamespace(monotonic=lambda: now, CLOCK_MONOTONIC=time.CLOCK_MONOTONIC)
    monkeypatch.setattr("hsswap.bench.lag.time", stopped)
    with LoopLag() as watch:
        await until(lambda: bool(watch.lags))  # the kernel's clock goes on
        first = len(watch.lags)
        assert watch.lags == pytest.approx([-PERIOD_S * n for n in range(1, first + 1)])
    assert watch._due == pytest.approx(now + (first + 1) * PERIOD_S)
