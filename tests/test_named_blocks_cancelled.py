"""Calls on blocks named by id that are cancelled half-way: nothing is lost."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from hsswap.io.memory import Fault, FaultKind
from tests.driver import oracle
from tests.swap_cases import SMALL, config_for, random_case
from tests.swap_watch import turns, until, watched

CASE = random_case(SMALL, 16, seed=67)
VALID = 7


@pytest.mark.parametrize("late", [False, True])
async def test_an_id_that_is_not_let_go_after_all_keeps_its_blocks(late: bool) -> None:
    """One layer's block is on its way to disk, another's is only in memory, not full."""
    held = Fault(FaultKind.HOLD, only="write")
    config = config_for(CASE, capacity=400, extra_host=40)
    async with watched(config, held) as swap:
        block = await swap.alloc_disk_block_id()
        for layer, valid in ((1, 16), (0, VALID)):
            keys, values = CASE.keys[layer], CASE.values[layer]
            await swap.offload_block(
                layer=layer, block=block, k_block_host=keys, v_block_host=values, valid_tokens=valid
            )
        await until(held.gate.reached.is_set)
        letting_go = asyncio.ensure_future(swap.dec_disk_ref(block=block))
        if late:  # by now it waits for the write alone
            await swap.named.unused()
        await turns(5)
        letting_go.cancel()
        await asyncio.wait([letting_go])
        assert letting_go.cancelled()
        assert swap.disk_refcount(block=block) == 1
        held.gate.opened.set()
        for layer, valid in ((1, 16), (0, VALID)):
            group, query = CASE.dims.group(layer), CASE.queries[layer][:1]
            out = np.zeros((1, group.q_heads, group.value_dim), np.uint16)
            result = await swap.attend_layer(
                layer=layer, seq_block_ids=[block], q_dev=query, output_dev=out
            )
            await result.done()
            heads = oracle.Heads(group.group_size, group.logit_scale)
            keys, values = CASE.keys[layer][:valid], CASE.values[layer][:valid]
            wanted = oracle.attend(query, keys, values, valid, heads)
            error = oracle.relative_error(oracle.decode(out), wanted.exact)
            assert error <= wanted.tolerance()
        assert await swap.dec_disk_ref(block=block) == 0
