"""E4M3 through a swap, rounded there or before: exact, top-k, forked, cut, captured, stored."""

from __future__ import annotations

import asyncio
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap import (
    ArgumentError,
    ConfigError,
    E4M3Rows,
    HighSpeedSwap,
    LayerGroup,
    ModelDims,
    PredictorConfig,
    SwapConfig,
    Tensor,
    TopK,
)
from hsswap.driver.tensor import tensor_in
from hsswap.io.memory import MemoryIO
from tests import e4m3_oracle
from tests.driver import oracle
from tests.e2e_script import Desk
from tests.swap_cases import Case, check_against_oracle, config_for, feed, kept, random_case

TOKENS = 420
DIMS = ModelDims(
    (LayerGroup(2, 6, 2, 16, kv_dtype="e4m3"), LayerGroup(1, 4, 4, 64, 40, kv_dtype="e4m3"))
)
CASE = random_case(DIMS, TOKENS, 12)


def quantised(rows: np.ndarray) -> E4M3Rows:
    """As an engine would hand them over that rounds by itself, by the oracle."""
    return E4M3Rows(*e4m3_oracle.quantised(oracle.decode(rows)))


async def outputs_of(case: Case, extra: int, chunk: int, *, ours: bool = True) -> list[np.ndarray]:
    config = config_for(case, extra_host=extra, extra_device=extra)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as sequence:
        outputs: list[list[np.ndarray]] = [[], [], []]
        for start in range(0, TOKENS, chunk):
            part = slice(start, min(TOKENS, start + chunk))
            for layer in range(3):
                rows = case.keys[layer][part], case.values[layer][part]
                await sequence.append(layer, *(rows if ours else map(quantised, rows)))
                result = await sequence.attend(layer, case.queries[layer][part])
                await result.done()
                outputs[layer].append(np.asarray(result.out))
        return [np.concatenate(parts) for parts in outputs]


async def test_exact_attention() -> None:
    outputs = await outputs_of(CASE, 20, 60)
    check_against_oracle(CASE, outputs, [0, 15, 16, 200, TOKENS - 1])
    for extra, chunk, ours in ((0, 7, True), (90, TOKENS, True), (20, 60, False), (0, 1, False)):
        again = await outputs_of(CASE, extra, chunk, ours=ours)
        for got, same in zip(again, outputs, strict=True):
            assert got.tobytes() == same.tobytes()


async def test_half_of_the_bytes() -> None:
    """What is stored and in slots is what the layout says, and a store says so."""
    group = LayerGroup(1, 8, 8, 128, kv_dtype="e4m3")
    dims, wide = ModelDims((group,)), ModelDims((replace(group, kv_dtype="bf16"),))
    assert dims.unit_bytes(group) == 16 * (128 + 128) + 16 * 8
    assert dims.unit_bytes(group) / wide.unit_bytes(wide.groups[0]) == pytest.approx(
        0.516, abs=1e-3
    )
    planned = [SwapConfig.plan(d, 65536, 1 << 24, 1 << 24) for d in (dims, wide)]
    assert planned[0].device_slots > 1.9 * planned[1].device_slots
    with pytest.raises(ConfigError, match="kv_dtype 'f16' does not go with dtype 'bf16'"):
        replace(group, kv_dtype="f16")
    with pytest.raises(ConfigError, match="aux_bytes is 4; it must be a multiple of 8"):
        replace(group, aux_bytes=4)


@pytest.mark.parametrize("kind", ["codes", "projection"])
@pytest.mark.parametrize("ours", [True, False])
async def test_top_k_and_its_basis(kind: str, ours: bool) -> None:
    top_k = TopK(4, stand_in=False)
    case = random_case(DIMS, 1200, 13)
    config = replace(
        config_for(case, extra_host=200, extra_device=4 * 3 * top_k.cache_blocks(16)),
        predictor=PredictorConfig(kind, rank=8),
    )
    async with (
        HighSpeedSwap.open(config, io=MemoryIO()) as swap,
        swap.sequence(top_k=top_k) as sequence,
    ):
        length = case.tokens - 1
        for end in (length, length + 1):
            start = 0 if end == length else length
            for layer in range(3):
                rows = case.keys[layer][start:end], case.values[layer][start:end]
                await sequence.append(layer, *(rows if ours else map(quantised, rows)))
                asked = case.queries[layer][end - 1100 if start == 0 else start : end]
                exact = True if start == 0 else None
                result = await sequence.attend(layer, asked, exact=exact)
                await result.done()
        group = DIMS.group(2)
        assert result.chosen is not None
        assert swap.predictor is not None
        for head, chosen in enumerate(result.chosen):
            last = np.arange(case.tokens // 16 * 16, case.tokens)
            tokens = np.concatenate([*(np.arange(b * 16, b * 16 + 16) for b in chosen), last])
            keys, values = (
                kept(group, x[2][tokens, head : head + 1]) for x in (case.keys, case.values)
            )
            query = case.queries[2][-1:, head : head + 1]
            heads = oracle.Heads(1, group.logit_scale)
            wanted = oracle.attend(query, keys, values, len(tokens), heads)
            out = oracle.decode(np.asarray(result.out)[:, head : head + 1])
            assert oracle.relative_error(out, wanted.exact) <= wanted.tolerance()


async def test_forks_and_cuts_copy_codes_as_they_are() -> None:
    """What is active is copied, not rounded again: answers are those of a sequence of its own."""
    config = config_for(CASE, sequences=3, extra_host=100)
    wanted = await outputs_of(CASE, 0, TOKENS)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap, swap.sequence() as parent:
        for layer in range(3):
            await parent.append(layer, CASE.keys[layer], CASE.values[layer])
        async with parent.fork() as child:
            await parent.truncate(300)
            await parent.truncate(295)
            for layer in range(3):
                part = slice(295, TOKENS)
                await parent.append(layer, CASE.keys[layer][part], CASE.values[layer][part])
                for sequence in (parent, child):
                    result = await sequence.attend(layer, CASE.queries[layer][-2:])
                    await result.done()
                    assert np.asarray(result.out).tobytes() == wanted[layer][-2:].tobytes()


class Static:
    """What a graph of one step of every layer reads and writes: the last layer's rows are E4M3."""

    def __init__(self, swap: HighSpeedSwap, stack: ExitStack) -> None:
        def tensor(dtype: str, shape: tuple[int, ...]) -> Tensor:
            buffer = stack.enter_context(swap.device.allocate_host(4 * int(np.prod(shape))))
            return tensor_in(buffer, dtype, shape)

        self.rows: list[list[Tensor]] = []
        self.queries, self.out = [], []
        for layer in range(DIMS.layers):
            group = DIMS.group(layer)
            heads = (1, group.kv_heads)
            dtype = "e4m3" if layer == 2 else "bf16"
            parts = [tensor(dtype, (*heads, dim)) for dim in (group.head_dim, group.value_dim)]
            if dtype == "e4m3":
                parts += [tensor("f32", heads), tensor("f32", heads)]
            self.rows.append(parts)
            self.queries.append(tensor("bf16", (1, group.q_heads, group.head_dim)))
            self.out.append(tensor("bf16", (1, group.q_heads, group.value_dim)))

    def fill(self, token: int) -> None:
        for layer, parts in enumerate(self.rows):
            rows: list[NDArray[Any]] = [
                part[layer][token : token + 1] for part in (CASE.keys, CASE.values)
            ]
            if len(parts) == 4:
                halves = [e4m3_oracle.quantised(oracle.decode(row)) for row in rows]
                rows = [half[part] for part in range(2) for half in halves]
            for tensor, row in zip(parts, rows, strict=True):
                tensor.array()[...] = row
            self.queries[layer].array()[...] = CASE.queries[layer][token]
            self.out[layer].array()[...] = 0x7FC0

    def given(self, layer: int) -> tuple[object, object]:
        """Keys and values as ``append`` takes them."""
        parts = self.rows[layer]
        if len(parts) == 2:
            return parts[0], parts[1]
        return E4M3Rows(parts[0], parts[2]), E4M3Rows(parts[1], parts[3])


@pytest.mark.parametrize("name", ["host", pytest.param("cuda:0", marks=pytest.mark.gpu)])
async def test_captured_steps_are_those_of_calls(name: str) -> None:
    start, steps_count = TOKENS - 30, 30
    config = config_for(
        CASE,
        sequences=2,
        extra_host=300,
        extra_device=30,
        tile_tokens=256 if name == "host" else 1024,
    )
    async with HighSpeedSwap.open(replace(config, device=name), io=MemoryIO()) as swap:
        with ExitStack() as stack:
            stream = stack.enter_context(swap.device.stream())
            desk, static = Desk(swap.device, CASE), Static(swap, stack)
            stack.callback(desk.close)
            one, other = swap.sequence(), swap.sequence()
            for sequence in (one, other):
                for layer in range(3):
                    rows = desk.keys[layer].rows(0, start), desk.values[layer].rows(0, start)
                    await sequence.append(layer, *rows, stream=stream)
            wanted = []
            for token in range(start, TOKENS):
                static.fill(token)
                for layer in range(3):
                    await one.append(layer, *static.given(layer), stream=stream)
                    queries, out = static.queries[layer], static.out[layer]
                    await (await one.attend(layer, queries, out, stream=stream)).done()
                wanted.append([out.array().tobytes() for out in static.out])
            async with other.captured(steps_count, stream=stream) as steps:
                with stream.capture() as graph:
                    for layer in range(3):
                        steps.append(layer, *static.given(layer), stream=stream)
                        queries, out = static.queries[layer], static.out[layer]
                        steps.attend(layer, queries, out, stream=stream)
                    steps.advance(1, stream=stream)
                with graph:
                    for token, right in zip(range(start, TOKENS), wanted, strict=True):
                        static.fill(token)
                        graph.launch(stream)
                        await asyncio.to_thread(stream.synchronize)
                        assert [out.array().tobytes() for out in static.out] == right
                steps.finish(TOKENS)
            for sequence in (one, other):
                await sequence.close()


@pytest.mark.parametrize("ours", [True, False])
async def test_blocks_by_id(ours: bool) -> None:
    """Full blocks, and 4 tokens of the last."""
    wanted = await outputs_of(CASE, 0, TOKENS)
    config = config_for(CASE, extra_host=100)
    async with HighSpeedSwap.open(config, io=MemoryIO()) as swap:
        ids = [await swap.alloc_disk_block_id() for _ in range(27)]
        for layer in range(3):
            for number, block in enumerate(ids):
                rows: list[Any] = [
                    np.resize(
                        part[layer][16 * number : 16 * number + 16], (16, *part[layer].shape[1:])
                    )
                    for part in (CASE.keys, CASE.values)
                ]
                rows = rows if ours else [quantised(part) for part in rows]
                await swap.offload_block(
                    layer=layer,
                    block=block,
                    k_block_host=rows[0],
                    v_block_host=rows[1],
                    valid_tokens=16 if number < 26 else 4,
                )
            out = np.full_like(wanted[layer][0], 0x7FC0)
            result = await swap.attend_layer(
                layer=layer, seq_block_ids=ids, q_dev=CASE.queries[layer][-1], output_dev=out
            )
            await result.done()
            assert out.tobytes() == wanted[layer][-1].tobytes()
        with pytest.raises(ArgumentError, match="one of keys and values is E4M3Rows"):
            await swap.offload_block(
                layer=0,
                block=ids[0],
                k_block_host=quantised(CASE.keys[0][:16]),
                v_block_host=CASE.values[0][:16],
            )


async def test_a_store_of_another_kind_is_refused(tmp_path: Path) -> None:
    config = replace(config_for(CASE), directory=tmp_path / "store", persist=True)
    tokens = np.arange(TOKENS)
    async with HighSpeedSwap.open(config) as swap, swap.sequence() as sequence:
        outputs = await feed(sequence, CASE, [TOKENS])
        await sequence.commit(tokens)
    groups = tuple(replace(group, kv_dtype="bf16") for group in DIMS.groups)
    other = replace(config, dims=ModelDims(groups))
    with pytest.raises(ConfigError, match="layer group 0 with kv_dtype 'e4m3', not 'bf16'"):
        async with HighSpeedSwap.open(other):
            pass
    async with HighSpeedSwap.open(config) as swap, await swap.open_prefix(tokens) as sequence:
        length = sequence.length
        assert length == TOKENS // 16 * 16
        for layer in range(3):
            result = await sequence.attend(layer, CASE.queries[layer][length - 2 : length])
            await result.done()
            wanted = outputs[layer][length - 2 : length]
            assert np.asarray(result.out).tobytes() == wanted.tobytes()


async def test_rows_that_do_not_go_together_are_refused() -> None:
    rows = CASE.keys[0][:5], CASE.values[0][:5]
    codes = [quantised(part) for part in rows]
    short = E4M3Rows(codes[0].codes, np.ones((4, 2), np.float32))
    wide = E4M3Rows(rows[0], codes[0].scales)
    bad: list[tuple[object, object, str]] = [
        (codes[0], rows[1], "one of keys and values is E4M3Rows"),
        (short, codes[1], "the scales of keys has shape"),
        (wide, codes[1], "keys has dtype uint16; uint8 is needed"),
    ]
    async with HighSpeedSwap.open(config_for(CASE), io=MemoryIO()) as swap, swap.sequence() as one:
        for keys, values, message in bad:
            with pytest.raises(ArgumentError, match=message):
                await one.append(0, keys, values)
        assert one.length == 0
    plain = random_case(ModelDims.uniform(layers=1, q_heads=6, kv_heads=2, head_dim=16), 20, 1)
    async with HighSpeedSwap.open(config_for(plain), io=MemoryIO()) as swap, swap.sequence() as one:
        with pytest.raises(ArgumentError, match="the layer is kept as bf16"):
            await one.append(0, *codes)
