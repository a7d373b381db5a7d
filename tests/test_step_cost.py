"""What a decode step of a layer asks of Python does not grow with the blocks of the sequence.

Counted, not timed: calls of functions, and the largest part of any table that is looked at. Blocks
of one token, so that every step fills one and hands it on to the disk.
"""

from __future__ import annotations

import statistics
import sys
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, PredictorConfig, Sequence, SwapConfig, TopK
from tests.swap_cases import Case, random_case
from tests.swap_watch import pools_of, until, watched

DIMS = ModelDims.uniform(layers=2, q_heads=2, kv_heads=2, head_dim=8, block_size=1)
CASE = random_case(DIMS, 4400, 4)
TOP_K = TopK(8)
KINDS = ["device", "host", "top-k"]
WARM, STEPS = 70, 40
FEW, MANY = 600, 4200  # no table doubles on the way
SMALL = 300
"""Entries. A choice has 137 blocks (8, the first one and 128 tokens) for each of two heads."""


def config_of(kind: str, blocks: int) -> SwapConfig:
    """Everything stays in device slots, or in the host tier."""
    room = DIMS.layers * (blocks + 300)
    return SwapConfig(
        DIMS,
        capacity_tokens=blocks + 300,
        device_slots=1200 + (room if kind == "device" else 0),
        host_slots=room + 4096,
        tile_tokens=256,
        predictor=PredictorConfig("projection", rank=1),
    )


class Seen(np.ndarray):
    """Remembers how much of it was looked at, or written, in one go."""

    most = 0

    def __getitem__(self, key: Any) -> Any:
        found = super().__getitem__(key)
        parts = key if isinstance(key, tuple) else (key,)
        if any(isinstance(part, np.ndarray | list) for part in parts):  # else it is a view
            Seen.most = max(Seen.most, found.size)
        return found

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        Seen.most = max(Seen.most, np.ndarray.__getitem__(self, key).size)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **options: Any) -> Any:
        Seen.most = max(Seen.most, *(i.size for i in inputs if isinstance(i, Seen)))
        plain = [i.view(np.ndarray) if isinstance(i, Seen) else i for i in inputs]
        out = options.get("out")
        if out is not None:
            options["out"] = tuple(o.view(np.ndarray) if isinstance(o, Seen) else o for o in out)
        result = getattr(ufunc, method)(*plain, **options)
        return out[0] if out is not None else result

    def __array_function__(self, function: Any, types: Any, given: Any, options: Any) -> Any:
        Seen.most = max(Seen.most, *(i.size for i in given if isinstance(i, Seen)), 0)
        plain = [i.view(np.ndarray) if isinstance(i, Seen) else i for i in given]
        return function(*plain, **options)


def watch_tables(swap: HighSpeedSwap, sequence: Sequence) -> None:
    """From here on, what is looked at of the tables counts. Those of the device are its own."""
    for cache in sequence._layers:
        cache.device_slot = cache.device_slot.view(Seen)
        assert cache.residents is not None
        cache.residents._seen = cache.residents._seen.view(Seen)
    sequence._room = sequence._room.view(Seen)
    for pool in pools_of(swap):
        tier = pool.tier
        tier._rows = [row.view(Seen) for row in tier._rows]
        for name in ("state", "leases", "pinned", "_ahead", "_cached", "_stamp"):
            setattr(tier, name, getattr(tier, name).view(Seen))
    assert swap.predictor is not None
    swap.predictor._coded = swap.predictor._coded.view(Seen)
    Seen.most = 0


async def step(sequence: Sequence, case: Case, row: int) -> list[bytes]:
    """One row of every layer; the answers."""
    answers = []
    part = slice(row, row + 1)
    for layer in range(DIMS.layers):
        keys, values = case.keys[layer][part], case.values[layer][part]
        assert sequence.try_append(layer, keys, values)
        result = sequence.try_attend(layer, case.queries[layer][part])
        if sequence.top_k is not None:
            assert result is None
            result = await sequence.attend(layer, case.queries[layer][part])
        assert result is not None
        await result.done()
        answers.append(np.asarray(result.out).tobytes())
    return answers


async def filled(swap: HighSpeedSwap, kind: str, blocks: int) -> Sequence:
    """A sequence that decodes already."""
    sequence = swap.sequence(top_k=TOP_K if kind == "top-k" else None)
    for layer in range(DIMS.layers):
        await sequence.append(layer, CASE.keys[layer][:blocks], CASE.values[layer][:blocks])
    await swap.flush()
    for row in range(blocks, blocks + WARM):
        await step(sequence, CASE, row)
    return sequence


@contextmanager
def counting(into: list[int]) -> Any:
    """Adds how many functions were called, of Python and of C."""
    count = [0]

    def tick(frame: Any, event: str, argument: Any) -> None:
        count[0] += event in ("call", "c_call")

    sys.setprofile(tick)
    try:
        yield
    finally:
        sys.setprofile(None)
        into.append(count[0])


async def calls_of(kind: str, blocks: int) -> float:
    """Functions called in a step, in the median."""
    async with watched(config_of(kind, blocks)) as swap:
        sequence = await filled(swap, kind, blocks)
        counts: list[int] = []
        for row in range(blocks + WARM, blocks + WARM + STEPS):
            await until(lambda: swap.writes.pending == 0)
            with counting(counts):
                await step(sequence, CASE, row)
        return statistics.median(counts)


@pytest.mark.parametrize("kind", KINDS)
async def test_calls_do_not_grow_with_the_blocks(kind: str) -> None:
    few, many = await calls_of(kind, FEW), await calls_of(kind, MANY)
    assert many <= 1.1 * few, (few, many)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_step_looks_at_what_changed_and_no_more(kind: str) -> None:
    async with watched(config_of(kind, MANY)) as swap:
        sequence = await filled(swap, kind, MANY)
        watch_tables(swap, sequence)
        for row in range(MANY + WARM, MANY + WARM + STEPS):
            await step(sequence, CASE, row)
        assert 0 < Seen.most <= SMALL
        assert swap.statistics().misses == 0
