"""64 tasks on one swap: families of sequences that grow, fork, are cut and cancelled at random.

The disk is slow at times and fails at times; slots are filled with NaN when they are given up, so
a slot refilled under its reader would show. Bounded by operations, never by time.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace

import numpy as np
import pytest

from hsswap import ModelDims, SwapConfig
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from tests.branch_actors import MOST, Grower, Kind, keep_gates, truths
from tests.swap_cases import U16, Case, config_for, random_case
from tests.swap_watch import Linked, watched, within

DIMS = ModelDims.uniform(layers=2, q_heads=4, kv_heads=2, head_dim=8)
CASE = random_case(DIMS, 3 * MOST, seed=91)
TASKS = 64


@pytest.fixture(scope="module")
def right() -> dict[Kind, list[U16]]:
    return asyncio.run(truths(CASE))


def tight(case: Case, more: int) -> SwapConfig:
    """Not all tasks can fork, nor fill their sequences: the store holds a quarter of their rows."""
    config = config_for(case, sequences=TASKS + 8, capacity=TASKS // 4 * MOST, extra_host=more)
    return replace(config, device_slots=config.device_slots + more)


async def rage(
    right: dict[Kind, list[U16]], seed: int, operations: int, *, faults: int, linked: bool = False
) -> tuple[int, int]:
    """One storm; operations that were done and answers that were compared."""
    random = np.random.default_rng(seed)
    gates = [Gate() for _ in range(8)]
    script = [
        Fault(FaultKind.HOLD, at=int(random.integers(30 * operations)), gate=gate) for gate in gates
    ]
    for _ in range(faults):
        kind = (FaultKind.ERRNO, FaultKind.FLIP, FaultKind.SHORT)[int(random.integers(3))]
        at, bit = int(random.integers(40 * operations)), int(random.integers(1 << 15))
        script.append(Fault(kind, at=at, count=1 + at % 3, only="read", bit=bit))
    if faults:
        full = int(random.integers(20 * operations))
        script.append(Fault(FaultKind.ERRNO, at=full, count=12, only="write", errno=errno.ENOSPC))
    device = Linked() if linked else None
    async with watched(tight(CASE, (0, 40)[seed % 2]), io=MemoryIO(script), device=device) as swap:
        ended = asyncio.Event()
        keeper = asyncio.ensure_future(keep_gates(gates, ended))
        growers = [Grower(swap, CASE, right, seed * 1000 + n) for n in range(TASKS)]

        async def storm() -> list[object]:
            runs = (grower.run(operations) for grower in growers)
            return list(await asyncio.gather(*runs, return_exceptions=True))

        try:
            ends = await within(storm, 60.0)
        finally:
            ended.set()
            await keeper
        for end in ends:
            if isinstance(end, BaseException):
                raise end
        return sum(g.done for g in growers), sum(g.calls for g in growers)


@pytest.mark.parametrize(
    ("seed", "faults", "linked"), [(1, 0, False), (2, 12, False), (3, 6, True)]
)
async def test_a_storm_of_families(
    right: dict[Kind, list[U16]], seed: int, faults: int, linked: bool
) -> None:
    done, calls = await rage(right, seed, 30, faults=faults, linked=linked)
    assert done == 30 * TASKS
    assert calls > 300


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(4, 12))
async def test_long_storms_of_families(right: dict[Kind, list[U16]], seed: int) -> None:
    faults = (0, 40)[seed % 2]
    done, calls = await rage(right, seed, 120, faults=faults, linked=seed % 3 == 0)
    assert done == 120 * TASKS
    assert calls > 1000
