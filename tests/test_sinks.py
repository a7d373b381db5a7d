"""Learned sinks through a swap: exact and top-k, async and blocking."""

from __future__ import annotations

import numpy as np
import pytest

import hsswap
from hsswap import ArgumentError, HighSpeedSwap, Sequence, TopK
from hsswap.io.memory import MemoryIO
from tests.driver import oracle
from tests.swap_cases import SMALL, Case, config_for, random_case

TOKENS = 420
SINKS = np.array([2.0, -1.0, 30.0, 0.0, -30.0, 4.0], np.float32)


@pytest.fixture(scope="module")
def case() -> Case:
    return random_case(SMALL, TOKENS, seed=11)


async def fill(sequence: Sequence, case: Case) -> None:
    for layer in range(case.dims.layers):
        await sequence.append(layer, case.keys[layer], case.values[layer])


def check(case: Case, layer: int, out: np.ndarray) -> None:
    """The rows of ``out`` are the last of the layer."""
    rows = len(out)
    group = case.dims.group(layer)
    queries = case.queries[layer][-rows:]
    heads = oracle.Heads(group.group_size, group.logit_scale)
    wanted = oracle.attend(queries, case.keys[layer], case.values[layer], TOKENS, heads)
    check_heads(wanted, out, slice(None))


def check_heads(wanted: oracle.Reference, out: np.ndarray, heads: slice) -> None:
    kept = 1 / (1 + np.exp(SINKS[heads] - wanted.lse))[..., None]
    usual = oracle.relative_error(wanted.usual * kept, wanted.exact * kept)
    error = oracle.relative_error(oracle.decode(out), wanted.exact * kept)
    assert error <= oracle.FACTOR * max(usual, oracle.FLOOR)


async def test_exact_attention_with_sinks(case: Case) -> None:
    config = config_for(case, extra_host=30)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        await fill(sequence, case)
        for rows in (1, 5):
            out = np.full((rows, 6, 16), 0x7FC0, np.uint16)
            result = await sequence.attend(1, case.queries[1][-rows:], out, sinks=SINKS)
            await result.done()
            check(case, 1, out)


async def test_top_k_attention_with_sinks(case: Case) -> None:
    """Over the chosen blocks of each KV head, and the block being filled."""
    top_k = TopK(4)
    config = config_for(case, extra_host=90, extra_device=3 * top_k.cache_blocks(16))
    async with (
        HighSpeedSwap.open(config, io=MemoryIO()) as swap,
        swap.sequence(top_k=top_k) as sequence,
    ):
        await fill(sequence, case)
        out = np.full((1, 6, 16), 0x7FC0, np.uint16)
        result = await sequence.attend(0, case.queries[0][-1:], out, sinks=SINKS)
        await result.done()
    assert result.chosen is not None
    group = case.dims.group(0)
    heads = oracle.Heads(group.group_size, group.logit_scale)
    for head, blocks in enumerate(result.chosen):
        last = np.arange(TOKENS // 16 * 16, TOKENS)
        tokens = np.concatenate([*(np.arange(b * 16, b * 16 + 16) for b in blocks), last])
        part = slice(head * 3, head * 3 + 3)
        keys, values = (x[0][tokens, head : head + 1] for x in (case.keys, case.values))
        queries = case.queries[0][-1:, part]
        check_heads(oracle.attend(queries, keys, values, len(tokens), heads), out[:, part], part)


def test_blocking_attention_with_sinks(case: Case) -> None:
    with (
        hsswap.blocking(config_for(case, extra_host=30), io=MemoryIO()) as swap,
        swap.sequence() as sequence,
    ):
        for layer in range(3):
            sequence.append(layer, case.keys[layer], case.values[layer])
        out = np.full((2, 6, 16), 0x7FC0, np.uint16)
        sequence.attend(2, case.queries[2][-2:], out, sinks=SINKS).synchronize()
        check(case, 2, out)


@pytest.mark.parametrize("sinks", [SINKS[:5], SINKS.astype(np.float64), "sinks"])
async def test_wrong_sinks_are_refused(case: Case, sinks: object) -> None:
    config = config_for(case, extra_host=90)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        await fill(sequence, case)
        with pytest.raises(ArgumentError, match="sinks"):
            await sequence.attend(0, case.queries[0][-1:], sinks=sinks)
