"""End to end, the same on every device: promise 1, bit for bit, whatever is resident where.

Six ragged sequences over three layer groups, forked, cut, reused and closed, with device slots for
a sixteenth of the blocks and host slots for a quarter, in both modes, on every backend.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from hsswap import HighSpeedSwap, SwapConfig, TopK
from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.io.base import BlockIO
from hsswap.io.memory import MemoryIO
from tests.driver import oracle
from tests.e2e_script import (
    BRANCHES,
    DIMS,
    MOST_TOKENS,
    TOP_K,
    Desk,
    Script,
    make_case,
    resident,
    tight,
)
from tests.soaking import loop_name, note
from tests.swap_cases import kept
from tests.swap_watch import Linked, watched

CASE = make_case()
SEED, STEPS = 26, 80

Log = dict[tuple[int, int, int], bytes]

DEVICES = [
    "host",
    pytest.param("linked", id="host-behind-a-link"),
    pytest.param("cuda:0", marks=pytest.mark.gpu),
]
PLACES = [
    *(("host", backend) for backend in ("memory", "posix", "auto")),
    pytest.param("host", "uring", marks=pytest.mark.uring),
    ("linked", "memory"),
    *(
        pytest.param("cuda:0", backend, marks=pytest.mark.gpu)
        for backend in ("memory", "posix", "auto")
    ),
    pytest.param("cuda:0", "uring", marks=[pytest.mark.gpu, pytest.mark.uring]),
    pytest.param("cuda:0", "gds-compat", marks=[pytest.mark.gpu, pytest.mark.gds]),
]
MODES = [pytest.param(None, id="exact"), pytest.param(TOP_K, id="top-k")]


def device_named(name: str) -> Device:
    """A device that the swap will close."""
    return Linked() if name == "linked" else open_device(name)


def tight_on(name: str) -> SwapConfig:
    return tight("host" if name == "linked" else name)


def test_the_tiers_are_as_small_as_they_are_said_to_be() -> None:
    for config in (tight("host"), tight("cuda:0")):
        blocks = DIMS.layers * DIMS.blocks_of(BRANCHES * MOST_TOKENS)
        assert 16 * config.device_slots <= blocks
        assert 4 * config.host_slots <= blocks
        caches = BRANCHES * DIMS.layers * TOP_K.cache_blocks(DIMS.block_size)
        assert config.device_slots >= config.min_device_slots + caches
    assert len(DIMS.groups) == 3


async def life_on(swap: HighSpeedSwap, seed: int, steps: int, top_k: TopK | None) -> Log:
    """One script to its end; its answers."""
    desk = Desk(swap.device, CASE)
    own = swap.device.stream()
    script = Script(swap, desk, seed, top_k, (None, own, own.handle))
    try:
        await script.run(steps)
        await script.end()
    finally:
        await asyncio.to_thread(own.synchronize)
        await asyncio.to_thread(own.close)
        await asyncio.to_thread(desk.close)
    assert script.most_lives == BRANCHES
    assert min(script.forks, script.cuts, script.reused) > 2
    assert 2 * script.most_tokens > BRANCHES * MOST_TOKENS
    return script.log


WANTED: dict[tuple[str, int, int, TopK | None], Log] = {}


async def wanted(name: str, seed: int, steps: int, top_k: TopK | None) -> Log:
    """The answers with everything resident; computed once for each device."""
    kind = "host" if name == "linked" else name
    key = kind, seed, steps, top_k
    if key not in WANTED:
        config = resident()
        async with HighSpeedSwap.open(config, io=MemoryIO(), device=device_named(kind)) as swap:
            WANTED[key] = await life_on(swap, seed, steps, top_k)
    return WANTED[key]


def compare(got: Log, right: Log) -> None:
    """All answers, and none more."""
    assert len(right) > 20
    assert got.keys() == right.keys()
    wrong = [key for key in got if got[key] != right[key]]
    assert not wrong, f"{len(wrong)} of {len(got)} answers differ, the first at {min(wrong)}"


@pytest.mark.parametrize("top_k", MODES)
@pytest.mark.parametrize(("name", "backend"), PLACES)
async def test_the_same_bits_as_with_everything_resident(
    name: str, backend: str, top_k: TopK | None, tmp_path: Path
) -> None:
    right = await wanted(name, SEED, STEPS, top_k)
    config = replace(tight_on(name), io=backend, directory=tmp_path / "store")
    io: BlockIO | None = MemoryIO() if backend == "memory" else None
    async with watched(config, io=io, device=device_named(name)) as swap:
        got = await life_on(swap, SEED, STEPS, top_k)
        statistics = swap.statistics()
    compare(got, right)
    assert statistics.blocks_written > 0
    assert statistics.misses > 0
    assert statistics.host_hits > 0


@pytest.mark.parametrize("name", DEVICES)
async def test_exact_answers_are_within_promise_1(name: str, tmp_path: Path) -> None:
    config = replace(tight_on(name), directory=tmp_path / "store")
    async with watched(config, device=device_named(name)) as swap:
        desk = Desk(swap.device, CASE)
        async with swap.sequence() as sequence:
            for layer in range(DIMS.layers):
                group = DIMS.group(layer)
                heads = oracle.Heads(group.group_size, group.logit_scale, group.window)
                for start, stop in ((0, 700), (700, 701), (701, 1390)):
                    keys, values = desk.keys[layer], desk.values[layer]
                    rows = keys.rows(start, stop), values.rows(start, stop)
                    await sequence.append(layer, *rows)
                    asked = min(3, stop - start)
                    out = desk.out(layer, asked)
                    queries = desk.queries[layer].rows(stop - asked, stop)
                    await (await sequence.attend(layer, queries, out)).done()
                    for row in range(asked):
                        at = stop - asked + row
                        right = oracle.attend(
                            CASE.queries[layer][at : at + 1],
                            kept(group, CASE.keys[layer]),
                            kept(group, CASE.values[layer]),
                            at + 1,
                            heads,
                        )
                        answer = oracle.decode(out.array()[row : row + 1])
                        assert oracle.relative_error(answer, right.exact) <= right.tolerance()
        await asyncio.to_thread(desk.close)


@pytest.mark.parametrize("name", DEVICES)
async def test_blocks_by_id_and_batches_answer_as_sequences(name: str, tmp_path: Path) -> None:
    """The same rows in sequences, in one batch, and as lists of ids."""
    sizes = (530, 16, 700, 1, 1100)
    config = replace(tight_on(name), directory=tmp_path / "store")
    async with watched(config, device=device_named(name)) as swap:
        desk = Desk(swap.device, CASE)
        for layer in range(DIMS.layers):
            keys, values, queries = desk.keys[layer], desk.values[layer], desk.queries[layer]
            sequences = [swap.sequence() for _ in sizes]
            for sequence, size in zip(sequences, sizes, strict=True):
                await sequence.append(layer, keys.rows(0, size), values.rows(0, size))
            alone = []
            for sequence, size in zip(sequences, sizes, strict=True):
                out = desk.out(layer, 3)
                asked = queries.rows(size - min(3, size), size)
                answer = out.rows(0, asked.shape[0])
                await (await sequence.attend(layer, asked, answer)).done()
                alone.append(out.array()[asked.shape[0] - 1].copy())
            out = desk.out(layer, len(sizes))
            rows = np.stack([CASE.queries[layer][size - 1] for size in sizes])
            results = await swap.attend_batch(layer, sequences, rows, out)
            for result in results:
                await result.done()
            assert (out.array() == np.stack(alone)).all()
            for sequence in sequences:
                await sequence.close()
            ids = [await swap.alloc_disk_block_id() for _ in range(34)]
            for number, block in enumerate(ids):
                part = slice(16 * number, 16 * number + 16)
                await swap.offload_block(
                    layer=layer,
                    block=block,
                    k_block_dev=keys.rows(part.start, part.stop),
                    v_block_host=CASE.values[layer][part],
                    valid_tokens=16 if number < 33 else 2,
                )
            one = desk.out(layer, 1)
            result = await swap.attend_layer_on_stream_with_q_pos(
                stream=None,
                layer=layer,
                seq_block_ids=ids,
                q_dev=queries.rows(529, 530),
                output_dev=one,
                last_block_valid_slots=2,
            )
            await result.done()
            assert (one.array()[0] == alone[0]).all()
            for block in ids:
                await swap.dec_disk_ref(block=block)
        await asyncio.to_thread(desk.close)


@pytest.mark.soak
@pytest.mark.parametrize("top_k", MODES)
@pytest.mark.parametrize("name", DEVICES)
async def test_two_thousand_steps(name: str, top_k: TopK | None, tmp_path: Path) -> None:
    right = await wanted(name, 2, 2000, top_k)
    config = replace(tight_on(name), directory=tmp_path / "store")
    async with watched(config, device=device_named(name)) as swap:
        got = await life_on(swap, 2, 2000, top_k)
    compare(got, right)
    what = f"e2e, {name}, {'exact' if top_k is None else 'top-k'}, {loop_name()}"
    note("swap", **{what: {"steps": 2000, "answers": len(got)}})
