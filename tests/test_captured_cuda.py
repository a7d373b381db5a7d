"""Captured steps on a GPU: CUDA graphs give what calls one by one give."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hsswap import HighSpeedSwap, ModelDims, Sequence, SwapConfig, TopK
from hsswap.captured import CapturedSteps
from hsswap.captured_top_k import CapturedTopK
from hsswap.config import PredictorConfig
from hsswap.driver.round_operations import CopyWork
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.io.memory import MemoryIO
from tests.driver import oracle
from tests.swap_cases import U16, random_case

pytestmark = pytest.mark.gpu

DIMS = ModelDims.uniform(layers=2, q_heads=8, kv_heads=2, head_dim=64)
CASE = random_case(DIMS, 1500, seed=51)
TOP_K = TopK(8, cache_factor=2)


class Rows:
    """K, V, Q and outputs of one row of each layer, in pinned memory."""

    def __init__(self, swap: HighSpeedSwap, stack: ExitStack) -> None:
        def tensor(heads: int) -> Tensor:
            buffer = stack.enter_context(swap.device.allocate_host(heads * 64 * 2))
            return tensor_in(buffer, "bf16", (1, heads, 64))

        self.keys, self.values = ([tensor(2) for _ in range(2)] for _ in range(2))
        self.queries, self.out = ([tensor(8) for _ in range(2)] for _ in range(2))

    def fill(self, row: int) -> None:
        """Take a row of the case."""
        for layer in range(2):
            self.keys[layer].array()[...] = CASE.keys[layer][row]
            self.values[layer].array()[...] = CASE.values[layer][row]
            self.queries[layer].array()[...] = CASE.queries[layer][row]
            self.out[layer].array()[...] = 0x7FC0


def config(host_slots: int, extra: int) -> SwapConfig:
    return SwapConfig(
        DIMS,
        capacity_tokens=4000,
        device="cuda:0",
        device_slots=160 + extra,
        host_slots=host_slots,
        max_sequences=2,
        tile_tokens=1024,
        predictor=PredictorConfig(),
    )


@asynccontextmanager
async def opened(settings: SwapConfig) -> AsyncIterator[tuple[HighSpeedSwap, Rows, Any]]:
    """A swap, static rows and a stream on the GPU."""
    async with HighSpeedSwap.open(settings, io=MemoryIO()) as swap:
        with ExitStack() as stack:
            stream = stack.enter_context(swap.device.stream())
            rows = Rows(swap, stack)
            yield swap, rows, stream


async def prefill(sequence: Sequence, rows: int, stream: Any, stack: ExitStack) -> None:
    """The first rows of the case, out of pinned memory."""
    for layer in range(2):
        parts = []
        for source in (CASE.keys[layer][:rows], CASE.values[layer][:rows]):
            buffer = stack.enter_context(sequence._swap.device.allocate_host(source.nbytes))
            part = tensor_in(buffer, "bf16", source.shape)
            part.array()[...] = source
            parts.append(part)
        await sequence.append(layer, parts[0], parts[1], stream=stream)


async def eager(sequence: Sequence, rows: Rows, row: int, stream: Any) -> list[U16]:
    """One step by calls."""
    rows.fill(row)
    for layer in range(2):
        await sequence.append(layer, rows.keys[layer], rows.values[layer], stream=stream)
        result = await sequence.attend(
            layer, rows.queries[layer], rows.out[layer], exact=True, stream=stream
        )
        await result.done()
    return [out.array().copy() for out in rows.out]


def enqueue(steps: CapturedSteps, rows: Rows, stream: Any) -> None:
    """One step as launches."""
    for layer in range(2):
        steps.append(layer, rows.keys[layer], rows.values[layer], stream=stream)
        steps.attend(layer, rows.queries[layer], rows.out[layer], stream=stream)
    steps.advance(1, stream=stream)


@pytest.mark.parametrize("settles", [False, True])
@pytest.mark.parametrize("extra", [0, 300])
async def test_the_same_bits_as_by_calls(extra: int, settles: bool) -> None:
    """Also where blocks are written as soon as they are final."""
    start, tokens = 1100, 40
    async with opened(config(500, extra)) as (swap, rows, stream):
        with ExitStack() as stack:
            one, other = swap.sequence(), swap.sequence()
            for sequence in (one, other):
                await prefill(sequence, start, stream, stack)
            await swap.flush()
            async with other.captured(tokens, stream=stream) as steps:
                with stream.capture() as graph:
                    enqueue(steps, rows, stream)
                with graph:
                    for row in range(start, start + tokens):
                        wanted = await eager(one, rows, row, stream)
                        rows.fill(row)
                        graph.launch(stream)
                        stream.synchronize()
                        for layer in range(2):
                            assert (rows.out[layer].array() == wanted[layer]).all(), (row, layer)
                        if settles:
                            steps.settle(row + 1)
                steps.finish(start + tokens)
            for row in range(start + tokens, start + tokens + 20):
                wanted = await eager(one, rows, row, stream)
                got = await eager(other, rows, row, stream)
                for layer in range(2):
                    assert (got[layer] == wanted[layer]).all(), (row, layer)
            await one.close()
            await other.close()


async def test_captured_top_k() -> None:
    start, tokens = 1205, 40
    settings = config(500, 2 * TOP_K.cache_blocks(16))
    async with opened(replace(settings, max_sequences=1)) as (swap, rows, stream):
        with ExitStack() as stack:
            sequence = swap.sequence(top_k=TOP_K)
            await prefill(sequence, start, stream, stack)
            async with sequence.captured(tokens, stream=stream) as steps:
                with stream.capture() as graph:
                    enqueue(steps, rows, stream)
                with graph:
                    for row in range(start, start + tokens):
                        rows.fill(row)
                        graph.launch(stream)
                        stream.synchronize()
                        for layer in range(2):
                            check(swap, steps, layer, row, rows.out[layer].array())
                steps.finish(start + tokens)
            await sequence.close()


def read(swap: HighSpeedSwap, tensor: Tensor) -> np.ndarray[Any, Any]:
    """A tensor of 32-bit integers, out of device memory."""
    words = int(np.prod(tensor.shape))
    with swap.device.allocate_host(4 * words) as buffer, swap.device.stream() as stream:
        target = tensor_in(buffer, "i32", tensor.shape)
        swap.device.copy_words(stream, CopyWork(tensor, target))
        stream.synchronize()
        return target.array().copy()


def check(swap: HighSpeedSwap, steps: CapturedSteps, layer: int, row: int, out: U16) -> None:
    """The answer over exactly the blocks that were attended."""
    captured = steps._layers[layer]
    assert isinstance(captured, CapturedTopK)
    choice = read(swap, captured._tensor("chosen"))
    assert not read(swap, captured._tensor("absent count")).any()
    ranked = captured.held.first
    for head in range(2):
        chosen = choice[head].tolist()
        assert len(set(chosen)) == TOP_K.pinned_blocks(16) + TOP_K.k
        assert {0, *range(ranked - 8, ranked)} <= set(chosen)
        seen = [*chosen, *range(ranked, row // 16 + 1)]
        tokens = [t for b in seen for t in range(b * 16, min(b * 16 + 16, row + 1))]
        part = slice(head * 4, head * 4 + 4)
        wanted = oracle.attend(
            CASE.queries[layer][row : row + 1, part],
            CASE.keys[layer][tokens][:, head : head + 1],
            CASE.values[layer][tokens][:, head : head + 1],
            len(tokens),
            oracle.Heads(4, 64**-0.5),
        )
        error = oracle.relative_error(oracle.decode(out[:, part]), wanted.exact)
        assert error <= wanted.tolerance()
