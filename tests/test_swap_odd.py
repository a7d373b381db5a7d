"""Odd shapes through HighSpeedSwap on the least slots, against float64 attention and bit for bit
against the same script with everything resident: promise 1.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from hsswap import LayerGroup, ModelDims, SwapConfig, TopK
from hsswap.config import PredictorConfig
from tests.driver import oracle
from tests.swap_actors import roomy
from tests.swap_cases import Case, check_against_oracle, config_for, feed, random_case
from tests.swap_watch import watched

SHAPES = 22
DIMENSIONS = (8, 16, 24, 40, 64, 72, 128, 200, 248, 256)
BLOCK_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def odd_case(seed: int) -> tuple[Case, list[int]]:
    """Dims, tokens and chunks drawn from a seed; every block size comes in turn."""
    random = np.random.default_rng(seed)

    def pick(*values: int) -> int:
        return values[int(random.integers(len(values)))]

    groups = []
    for _ in range(pick(1, 1, 2, 3)):
        kv_heads = pick(1, 1, 2, 3, 5)
        window = pick(0, 0, 1, 7, 255, 256, 257, 400)
        kv_dtype = ("", "", "e4m3")[pick(0, 1, 2)]
        groups.append(
            LayerGroup(
                layers=pick(1, 2),
                q_heads=kv_heads * pick(1, 2, 3, 7, 9),
                kv_heads=kv_heads,
                head_dim=pick(*DIMENSIONS),
                value_dim=pick(0, *DIMENSIONS),
                window=window or None,
                soft_cap=(None, 15.0)[pick(0, 0, 1)],
                scale=(None, 0.05)[pick(0, 0, 1)],
                aux_bytes=pick(0, 0, 8 if kv_dtype else 2, 64, 4096 if kv_dtype else 4094),
                kv_dtype=kv_dtype,
            )
        )
    dims = ModelDims(tuple(groups), BLOCK_SIZES[seed % len(BLOCK_SIZES)])
    tokens = 1 + int(random.integers(pick(3, 300, 900)))
    chunks: list[int] = []
    while sum(chunks) < tokens:
        chunks.append(min(tokens - sum(chunks), 1 + int(random.integers(pick(2, 40, 700)))))
    if len(chunks) > 12:  # a single append of all that is left: rows larger than a tile
        chunks = [*chunks[:11], sum(chunks[11:])]
    return random_case(dims, tokens, seed), chunks


async def through(case: Case, config: SwapConfig, chunks: list[int]) -> list[np.ndarray]:
    async with watched(config) as swap:
        outputs = await feed(swap.sequence(), case, chunks)
        await swap.flush()
    return list(outputs)


@pytest.mark.parametrize("seed", range(SHAPES))
def test_odd_shapes_are_exact_and_the_same_however_they_are_kept(seed: int) -> None:
    case, chunks = odd_case(seed)
    random = np.random.default_rng(seed)
    least = asyncio.run(through(case, config_for(case), chunks))
    alone = asyncio.run(through(case, roomy(case), [case.tokens]))
    for layer, (one, other) in enumerate(zip(least, alone, strict=True)):
        assert (one == other).all(), f"layer {layer} of {case.dims}, chunks {chunks}"
    edges = {0, case.tokens - 1, case.tokens // 2, int(random.integers(case.tokens))}
    check_against_oracle(case, least, sorted(edges))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("top_k", [TopK(1, 1), TopK(3)])
async def test_top_k_over_any_block_size(block_size: int, top_k: TopK) -> None:
    """The rows of a window, ragged blocks, ratios that are no power of two; small and large tiers
    agree, and what was chosen is attended exactly.
    """
    dims = ModelDims((LayerGroup(1, 6, 2, 24, 16), LayerGroup(1, 3, 1, 8, window=60)), block_size)
    most = top_k.pinned_blocks(block_size) + top_k.k
    tokens = (most + 3) * block_size + block_size // 3 + 4
    case = random_case(dims, tokens, block_size)
    caches = 2 * 2 * top_k.cache_blocks(block_size) * len(dims.groups)
    tight = config_for(case, extra_device=caches)
    outputs = []
    for config in (tight, roomy(case, top_k)):
        config = replace(config, predictor=PredictorConfig("projection", rank=5))
        async with watched(config) as swap:
            sequence = swap.sequence(top_k=top_k)
            rows = await feed(sequence, case, [tokens - 4, 1, 1, 1, 1])
            outputs.append(rows)
            result = await sequence.attend(0, case.queries[0][-1:])
            await result.done()
            assert result.chosen is not None
            check_chosen(case, result.chosen, np.asarray(result.out))
    for one, other in zip(*outputs, strict=True):
        assert (one == other).all()


def check_chosen(case: Case, chosen: np.ndarray, out: np.ndarray) -> None:
    """Promise 1 of layer 0's last row over the chosen blocks and the one being filled."""
    group, size = case.dims.group(0), case.dims.block_size
    for head in range(group.kv_heads):
        blocks = [*chosen[head].tolist()]
        tokens = [t for b in blocks for t in range(b * size, (b + 1) * size)]
        tokens += range(case.tokens // size * size, case.tokens)
        part = slice(head * group.group_size, (head + 1) * group.group_size)
        wanted = oracle.attend(
            case.queries[0][-1:, part],
            case.keys[0][tokens][:, head : head + 1],
            case.values[0][tokens][:, head : head + 1],
            len(tokens),
            oracle.Heads(group.group_size, group.logit_scale),
        )
        error = oracle.relative_error(oracle.decode(out[:, part]), wanted.exact)
        assert error <= wanted.tolerance()


@pytest.mark.parametrize("block_size", [1, 16, 256])
async def test_any_strides_and_integer_kinds_give_the_same_bits(block_size: int) -> None:
    """Keys, values, queries and outputs as views: reversed, transposed, with gaps, int16."""
    case = random_case(ModelDims.uniform(layers=1, q_heads=4, kv_heads=2, head_dim=16), 600, 3)
    case = replace(case, dims=replace(case.dims, block_size=block_size))
    keys, values, queries = case.keys[0], case.values[0], case.queries[0]
    wide = np.zeros((600, 4, 48), np.uint16)
    wide[:, 1:3, 16:32] = keys
    forms = [
        (keys, values, queries),
        (wide[:, 1:3, 16:32], values.astype(np.int16), queries[::-1].copy()[::-1]),
        (
            keys.transpose(2, 1, 0).copy().transpose(2, 1, 0),
            np.asfortranarray(values),
            np.repeat(queries, 2, axis=1)[:, ::2],
        ),
    ]
    outputs = []
    for k, v, q in forms:
        async with watched(config_for(case)) as swap:
            sequence = swap.sequence()
            await sequence.append(0, k, v)
            out = np.full((600, 8, 16), 0x7FC0, np.uint16)[::-1, ::2]
            await (await sequence.attend(0, q, out)).done()
            outputs.append(out)
    assert all((out == outputs[0]).all() for out in outputs)
