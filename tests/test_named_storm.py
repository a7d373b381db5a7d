"""Tables of ids, of callers' own, beside families of sequences on one swap: bits as ever.

The disk is slow at times and fails at times. Bounded by operations, never by time.
"""

from __future__ import annotations

import asyncio
import errno

import numpy as np
import pytest

from hsswap import LayerGroup, ModelDims
from hsswap.driver.host import HostDevice
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from tests.branch_actors import MOST, Grower, Kind, truths
from tests.named_actors import Tabler
from tests.places import Places
from tests.storming import storm
from tests.swap_cases import U16, config_for, random_case
from tests.swap_watch import Linked, watched

DIMS = ModelDims(
    (
        LayerGroup(1, 2, 1, 8, kv_dtype="e4m3"),
        LayerGroup(1, 2, 1, 8, 16, window=200),
        LayerGroup(1, 4, 2, 16, 8, soft_cap=15.0),
    )
)
CASE = random_case(DIMS, 3 * MOST, seed=17)
TASKS = 12
LIMIT_S = 60.0
TRUTHS: dict[Kind, list[U16]] = {}


def script_of(random: np.random.Generator, operations: int, faults: int) -> list[Fault]:
    """Reads that fail or come back wrong, and writes into a full disk."""
    script = []
    kinds = (FaultKind.ERRNO, FaultKind.FLIP, FaultKind.SHORT)
    for _ in range(faults):
        kind, at = kinds[int(random.integers(3))], int(random.integers(30 * operations))
        bit = int(random.integers(1 << 15))
        script.append(Fault(kind, at=at, count=1 + at % 3, only="read", bit=bit))
    if faults:
        at = int(random.integers(15 * operations))
        script.append(Fault(FaultKind.ERRNO, at=at, count=9, only="write", errno=errno.ENOSPC))
    return script


@pytest.mark.parametrize("device", [HostDevice, Linked])
@pytest.mark.parametrize(("seed", "faults"), [(1, 0), (2, 12), (3, 30)])
async def test_a_storm_of_tables(seed: int, faults: int, device: type[HostDevice]) -> None:
    if not TRUTHS:
        TRUTHS.update(await truths(CASE))
    random, operations = np.random.default_rng(seed), 40
    gates = [Gate() for _ in range(5)]
    script = script_of(random, operations, faults) + [
        Fault(FaultKind.HOLD, at=int(random.integers(20 * operations)), gate=gate) for gate in gates
    ]
    config = config_for(
        CASE,
        sequences=TASKS,
        capacity=TASKS * MOST // 2,
        extra_device=int(random.integers(150)),
        extra_host=(0, 30, 200)[seed % 3],
    )
    async with watched(config, io=MemoryIO(script), device=device()) as swap:
        places = Places(swap.device)
        tablers = [Tabler(swap, CASE, TRUTHS, seed * 100 + n) for n in range(TASKS - 4)]
        growers = [Grower(swap, CASE, TRUTHS, seed * 1000 + n, places) for n in range(4)]
        await storm([*tablers, *growers], operations, LIMIT_S, gates)
        await asyncio.to_thread(places.close)
    assert sum(tabler.done for tabler in tablers) == operations * len(tablers)
    assert sum(tabler.calls for tabler in tablers) > 40
    assert sum(tabler.shared for tabler in tablers) > 5
