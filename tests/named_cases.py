"""Blocks named by id: cases, and the calls as tests make them."""

from __future__ import annotations

from collections.abc import Sequence as Several

import numpy as np

from hsswap import (
    HighSpeedSwap,
    SwapConfig,
)
from tests.swap_cases import MIXED, SMALL, Case, config_for, random_case

CASE = random_case(SMALL, 700, seed=61)
OTHER = random_case(MIXED, 700, seed=62)


def config_of(case: Case, *, extra_device: int = 0, extra_host: int = 0) -> SwapConfig:
    return config_for(
        case, capacity=1600, extra_device=extra_device, extra_host=extra_host, sequences=2
    )


def block_of(case: Case, layer: int, number: int, valid: int) -> dict[str, object]:
    """K and V of one block as arguments; what is not valid is NaN."""
    size = case.dims.block_size
    arguments: dict[str, object] = {"valid_tokens": valid}
    for name, rows in (("k_block_host", case.keys[layer]), ("v_block_host", case.values[layer])):
        block = np.full((size, *rows.shape[1:]), 0x7FC0, np.uint16)
        block[:valid] = rows[number * size : number * size + valid]
        arguments[name] = block
    return arguments


async def offload(
    swap: HighSpeedSwap, case: Case, tokens: int, ids: list[int], first: int = 0
) -> None:
    """Offload the blocks of the first ``tokens`` rows from number ``first`` on, in all layers."""
    size = case.dims.block_size
    for number in range(first, -(-tokens // size)):
        if number == len(ids):
            ids.append(await swap.alloc_disk_block_id())
        valid = min(size, tokens - number * size)
        for layer in range(case.dims.layers):
            block = block_of(case, layer, number, valid)
            await swap.offload_block(layer=layer, block=ids[number], **block)  # type: ignore[arg-type]


async def attend(
    swap: HighSpeedSwap, case: Case, layer: int, ids: Several[int], row: int, **more: int
) -> np.ndarray:
    """One row's answer."""
    group = case.dims.group(layer)
    out = np.full((group.q_heads, group.value_dim), 0x7FC0, np.uint16)
    query = case.queries[layer][row]
    arguments = {"layer": layer, "seq_block_ids": ids, "q_dev": query, "output_dev": out}
    if more:
        call = swap.attend_layer_on_stream_with_q_pos(stream=None, **arguments, **more)
    else:
        call = swap.attend_layer(**arguments)
    await (await call).done()
    return out


async def give_back(swap: HighSpeedSwap, ids: list[int]) -> None:
    for block in ids:
        assert await swap.dec_disk_ref(block=block) == 0
