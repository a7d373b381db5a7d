"""Reading ahead by an approximate query: fewer late reads, and not one bit of difference."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsswap import ArgumentError, HighSpeedSwap, ModelDims, PredictorConfig, TopK
from hsswap.io.ids import INDEX_MASK
from hsswap.io.memory import Fault, FaultKind, Gate, MemoryIO
from hsswap.tiers import I32, I64
from tests.swap_cases import Case, config_for, random_case
from tests.swap_watch import fill, turns, until, watched
from tests.test_codes_predictor import DIMS, TOKENS, TOP_K, config, prefill

PROMPT, STEPS = 1200, 12


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(DIMS, TOKENS, seed=43)


async def run(case: Case, ahead: str) -> tuple[list[np.ndarray], int, int]:
    """Outputs of some steps, blocks that attends had to wait for, and blocks read ahead."""
    outs, asked = [], 0
    async with (
        HighSpeedSwap.open(config(host_slots=40), io=MemoryIO()) as swap,
        swap.sequence(top_k=TOP_K) as sequence,
    ):
        await prefill(sequence, case, PROMPT)
        await swap.flush()
        for layer in range(2):  # codes of all blocks are made here
            await (await sequence.attend(layer, case.queries[layer][PROMPT - 1 : PROMPT])).done()
        before = swap.statistics().misses
        for row in range(PROMPT, PROMPT + STEPS):
            part = slice(row, row + 1)
            for layer in range(2):
                if ahead:
                    source = row if ahead == "true query" else row - 1
                    query = case.queries[layer][source : source + 1]
                    asked += await sequence.look_ahead(layer, query)
                    await asyncio.sleep(0)
                    await swap.prefetcher.settle()
                await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                result = await sequence.attend(layer, case.queries[layer][part])
                await result.done()
                outs.append(np.asarray(result.out))
        return outs, swap.statistics().misses - before, asked


async def test_reads_are_ahead_and_outputs_the_same(case: Case) -> None:
    outs, misses, asked = await run(case, "")
    assert misses > 20
    assert asked == 0
    with_true, late, asked = await run(case, "true query")
    assert late < misses / 2
    assert asked > 20
    with_old, _, repeated = await run(case, "the last query")
    # The cache holds what the last query chose: next to nothing is new.
    assert repeated < asked / 2
    for other in (with_true, with_old):
        assert all((a == b).all() for a, b in zip(outs, other, strict=True))


async def test_nothing_to_look_ahead_for(case: Case) -> None:
    async with HighSpeedSwap.open(config(), io=MemoryIO()) as swap:
        async with swap.sequence() as exact:
            await exact.append(0, case.keys[0][:800], case.values[0][:800])
            assert await exact.look_ahead(0, case.queries[0][:1]) == 0
        async with swap.sequence(top_k=TOP_K) as short:
            await short.append(0, case.keys[0][:100], case.values[0][:100])
            assert await short.look_ahead(0, case.queries[0][:1]) == 0
            with pytest.raises(ArgumentError, match="queries has shape"):
                await short.look_ahead(0, case.queries[0][:2])


@pytest.mark.parametrize("turns", [0, 1, 2, 4])
async def test_a_cancelled_look_harms_nothing(case: Case, turns: int) -> None:
    async with (
        HighSpeedSwap.open(config(), io=MemoryIO()) as swap,
        swap.sequence(top_k=TopK(6)) as sequence,
    ):
        await prefill(sequence, case, PROMPT)
        await (await sequence.attend(0, case.queries[0][PROMPT - 1 : PROMPT])).done()
        looking = asyncio.ensure_future(sequence.look_ahead(0, case.queries[0][PROMPT:][:1]))
        for _ in range(turns):
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait([looking])
        result = await sequence.attend(0, case.queries[0][PROMPT - 1 : PROMPT])
        await result.done()


async def test_a_look_whose_sequence_is_gone_reads_nothing_of_the_next_owner() -> None:
    """Its reads wait for slots while the ids are freed and given to another sequence."""
    dims = ModelDims.uniform(layers=1, q_heads=6, kv_heads=2, head_dim=16)
    case, gate = random_case(dims, 1600, seed=47), Gate()
    query = case.queries[0][-1:]
    settings = replace(
        config_for(case, sequences=4, extra_device=17, capacity=10_000),
        predictor=PredictorConfig(kind="projection"),
    )
    io = MemoryIO((Fault(FaultKind.HOLD, only="read", gate=gate),))
    async with watched(settings, io=io) as swap:
        looking = swap.sequence(top_k=TopK(3))
        others = [swap.sequence(), swap.sequence()]
        for sequence in (looking, *others):
            await fill(sequence, case)
        passing = swap.sequence()  # its blocks push the others' out of the host tier
        await fill(passing, case)
        await swap.flush()
        await passing.close()
        held = [asyncio.ensure_future(other.attend(0, query)) for other in others]
        await until(gate.reached.is_set)
        assert await looking.look_ahead(0, case.queries[0][100:101]) > 10
        await turns(5)
        freed = set(looking.ids & INDEX_MASK)
        await looking.close()
        tier, found = swap.pool[0].tier, []
        take = tier.take

        def watching(layer: int, indices: I64, *args: Any, **options: Any) -> I32 | None:
            found.append(tier.lookup(layer, indices))
            return take(layer, indices, *args, **options)

        tier.take = watching  # type: ignore[method-assign]
        heir = swap.sequence()
        append = asyncio.ensure_future(heir.append(0, case.keys[0][:16], case.values[0][:16]))
        await turns(5)
        gate.opened.set()
        for attend in held:
            await (await asyncio.wait_for(attend, 20)).done()
        await asyncio.wait_for(append, 20)
        assert set(heir.ids & INDEX_MASK) <= freed
        assert found
        assert all((slots == -1).all() for slots in found), "two slots of one block"
