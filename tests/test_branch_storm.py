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
from hsswap.driver import open_device
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from tests.branch_actors import MOST, Grower, Kind, truths
from tests.places import Places
from tests.soaking import loop_name, note
from tests.storming import storm
from tests.swap_cases import U16, Case, config_for, random_case
from tests.swap_watch import Linked, watched

DIMS = ModelDims.uniform(layers=2, q_heads=4, kv_heads=2, head_dim=8)
CASE = random_case(DIMS, 3 * MOST, seed=91)
TASKS = 64
LIMIT_S = 100.0


DEVICES = ["host", "linked", pytest.param("cuda:0", marks=pytest.mark.gpu)]
TRUTHS: dict[str, dict[Kind, list[U16]]] = {}


async def right_on(name: str) -> dict[Kind, list[U16]]:
    """The right answers; computed once for each device."""
    kind = "host" if name == "linked" else name
    if kind not in TRUTHS:
        TRUTHS[kind] = await truths(CASE, kind)
    return TRUTHS[kind]


def tight(case: Case, more: int, name: str) -> SwapConfig:
    """Not all tasks can fork, nor fill their sequences: the store holds a quarter of their rows."""
    tile_tokens = 1024 if name == "cuda:0" else 256
    config = config_for(
        case,
        sequences=TASKS + 8,
        capacity=TASKS // 4 * MOST,
        extra_host=more,
        extra_device=more,
        tile_tokens=tile_tokens,
    )
    return replace(config, device="host" if name == "linked" else name)


async def rage(name: str, seed: int, operations: int, *, faults: int) -> tuple[int, int]:
    """One storm; operations that were done and answers that were compared."""
    right = await right_on(name)
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
    device = Linked() if name == "linked" else open_device(name)
    config = tight(CASE, (0, 40, 260)[seed % 3], name)
    async with watched(config, io=MemoryIO(script), device=device) as swap:
        places = Places(swap.device)
        growers = [Grower(swap, CASE, right, seed * 1000 + n, places) for n in range(TASKS)]
        await storm(growers, operations, LIMIT_S * operations / 30, gates)
        await asyncio.to_thread(places.close)
        return sum(g.done for g in growers), sum(g.calls for g in growers)


@pytest.mark.parametrize(("seed", "faults"), [(1, 0), (2, 12), (3, 6)])
@pytest.mark.parametrize("name", DEVICES)
async def test_a_storm_of_families(name: str, seed: int, faults: int) -> None:
    done, calls = await rage(name, seed, 30, faults=faults)
    assert done == 30 * TASKS
    assert calls > 300


@pytest.mark.soak
@pytest.mark.parametrize("faults", [0, 200])
@pytest.mark.parametrize("name", DEVICES)
async def test_a_long_storm_of_families(name: str, faults: int) -> None:
    """Two minutes of it on two cores of 2024."""
    done, calls = await rage(name, 5, 1000, faults=faults)
    assert done == 1000 * TASKS
    assert calls > 10_000
    what = f"families, {name}, {TASKS} tasks, {faults} faults, {loop_name()}"
    note("swap", **{what: {"operations": done, "calls": calls}})
