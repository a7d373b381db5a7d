"""FP16 through a swap: exact, top-k, forked, and bit for bit whatever the pools."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap import ArgumentError, HighSpeedSwap, LayerGroup, ModelDims, TopK
from hsswap.io.memory import MemoryIO
from tests.driver import oracle
from tests.swap_cases import Case, check_against_oracle, config_for

TOKENS = 420
DIMS = ModelDims((LayerGroup(2, 6, 2, 16, dtype="f16"), LayerGroup(1, 4, 4, 24, 40, dtype="f16")))


@pytest.fixture(scope="module")
def case() -> Case:
    rng = np.random.default_rng(12)
    groups = [DIMS.group(layer) for layer in range(3)]

    def draw(heads: int, dim: int) -> np.ndarray:
        return rng.standard_normal((TOKENS, heads, dim)).astype(np.float16)

    return Case(
        DIMS,
        [draw(g.kv_heads, g.head_dim) for g in groups],
        [draw(g.kv_heads, g.value_dim) for g in groups],
        [draw(g.q_heads, g.head_dim) for g in groups],
    )


async def outputs_of(case: Case, extra: int, chunk: int) -> list[np.ndarray]:
    config = config_for(case, extra_host=extra, extra_device=extra)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        outputs: list[list[np.ndarray]] = [[], [], []]
        for start in range(0, TOKENS, chunk):
            part = slice(start, min(TOKENS, start + chunk))
            for layer in range(3):
                await sequence.append(layer, case.keys[layer][part], case.values[layer][part])
                result = await sequence.attend(layer, case.queries[layer][part])
                await result.done()
                assert isinstance(result.out, np.ndarray)
                outputs[layer].append(result.out)
        return [np.concatenate(parts) for parts in outputs]


async def test_exact_attention_in_f16(case: Case) -> None:
    outputs = await outputs_of(case, 20, 60)
    assert outputs[0].dtype == np.float16
    check_against_oracle(case, outputs, [0, 15, 16, 200, TOKENS - 1])
    for extra, chunk in ((0, 7), (90, TOKENS)):
        for got, same in zip(await outputs_of(case, extra, chunk), outputs, strict=True):
            assert got.tobytes() == same.tobytes()


async def test_a_fork_and_top_k_in_f16(case: Case) -> None:
    top_k = TopK(4)
    blocks = 3 * top_k.cache_blocks(16)
    config = config_for(case, sequences=2, extra_host=200, extra_device=4 * blocks)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        async with swap.sequence(top_k=top_k) as sequence:
            for layer in range(3):
                await sequence.append(layer, case.keys[layer], case.values[layer])
            result = await sequence.attend(0, case.queries[0][-1:])
            await result.done()
            assert result.chosen is not None
            heads = oracle.Heads(3, 0.25)
            for head, chosen in enumerate(result.chosen):
                last = np.arange(TOKENS // 16 * 16, TOKENS)
                tokens = np.concatenate([*(np.arange(b * 16, b * 16 + 16) for b in chosen), last])
                part = slice(head * 3, head * 3 + 3)
                keys, values = (x[0][tokens, head : head + 1] for x in (case.keys, case.values))
                wanted = oracle.attend(case.queries[0][-1:, part], keys, values, len(tokens), heads)
                out = oracle.decode(np.asarray(result.out)[:, part])
                assert oracle.relative_error(out, wanted.exact) <= wanted.tolerance()
        async with swap.sequence() as parent:
            for layer in range(3):
                await parent.append(layer, case.keys[layer], case.values[layer])
            async with parent.fork() as child:
                for layer in range(3):
                    here, there = [
                        await one.attend(layer, case.queries[layer][-2:]) for one in (parent, child)
                    ]
                    await here.done()
                    await there.done()
                    assert np.asarray(here.out).tobytes() == np.asarray(there.out).tobytes()


async def test_the_other_calls_take_f16(case: Case) -> None:
    """A batch, a look ahead, and blocks by id, with the bits of a call for one sequence."""
    top_k = TopK(4)
    config = config_for(
        case, sequences=2, capacity=3 * TOKENS, extra_host=200, extra_device=4 * 3 * 13
    )
    async with (
        HighSpeedSwap.open(config, io=MemoryIO()) as swap,
        swap.sequence(top_k=top_k) as ranked,
        swap.sequence() as exact,
    ):
        for sequence in (ranked, exact):
            for layer in range(3):
                await sequence.append(layer, case.keys[layer], case.values[layer])
        assert await ranked.look_ahead(2, case.queries[2][-1:]) >= 0
        queries = case.queries[0][-1:]
        alone = await exact.attend(0, queries)
        await alone.done()
        wanted = np.asarray(alone.out).tobytes()
        out = np.full((2, 6, 16), np.nan, np.float16)
        both = [ranked, exact]
        for result in await swap.attend_batch(0, both, queries[[0, 0]], out, exact=True):
            await result.done()
        assert out[0].tobytes() == out[1].tobytes() == wanted
        ids = [await swap.alloc_disk_block_id() for _ in range(2)]
        for number, block in enumerate(ids):
            part = slice(16 * number, 16 * number + 16)
            keys, values = case.keys[0][part], case.values[0][part]
            await swap.offload_block(
                layer=0, block=block, k_block_host=keys, v_block_host=values, valid_tokens=16
            )
        named = np.full((6, 16), np.nan, np.float16)
        result = await swap.attend_layer(
            layer=0, seq_block_ids=ids, q_dev=case.queries[0][31], output_dev=named
        )
        await result.done()
        await exact.truncate(32)
        alone = await exact.attend(0, case.queries[0][31:32])
        await alone.done()
        assert named.tobytes() == np.asarray(alone.out).tobytes()
        for block in ids:
            await swap.dec_disk_ref(block=block)


async def test_bf16_codes_are_refused(case: Case) -> None:
    config = config_for(case)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        with pytest.raises(ArgumentError, match="keys has dtype uint16; float16 is needed"):
            await sequence.append(0, case.keys[0].view(np.uint16), case.values[0])
