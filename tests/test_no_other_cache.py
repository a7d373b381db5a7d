"""The swap's slots and store are the only place that has K and V of a sequence."""

from __future__ import annotations

import asyncio
import gc
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap.commands.decoding import SwapAttention
from hsswap.driver.base import Buffer
from hsswap.models import Llama
from hsswap.sync import BlockingSequence, BlockingSwap, blocking
from tests.running import TinyRun


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    return TinyRun.make(tmp_path_factory.mktemp("tiny"))


def zero_the_cache(swap: BlockingSwap, sequence: BlockingSequence) -> None:
    """Overwrite every byte of K and V that the swap has: device slots, host slots, disk."""
    inner, number = swap._swap, sequence._sequence.number

    async def write(layer: int, indices: NDArray[np.int64], zeros: Buffer) -> None:
        done = asyncio.get_running_loop().create_future()
        left = len(indices)

        def on_done(positions: NDArray[np.int64], error: Exception | None) -> None:
            nonlocal left
            assert error is None
            left -= len(positions)
            if left == 0:
                done.set_result(None)

        addresses = np.full(left, zeros.address, np.uint64)
        inner._store.write(layer, indices, addresses, on_done=on_done)
        await done

    async def stop_reading_ahead() -> None:
        inner.prefetcher.plan(number, [])
        await inner.prefetcher.settle()

    swap.flush()
    swap._loop.run(stop_reading_ahead())
    for pool in inner._pools:
        pool.units.memory.array()[...] = 0
        pool.blocks.memory.array()[...] = 0
    with inner.device.allocate_host(1 << 16) as zeros:
        for layer in range(inner.config.dims.layers):
            full = sequence._sequence.layer_length(layer) // 16
            assert full > 30
            swap._loop.run(write(layer, sequence._sequence._indices[:full], zeros))


class Zeroed(SwapAttention):
    """Keys and values replaced by zeros before they get to the swap, as long as ``on``."""

    on = True

    def attend(
        self,
        layer: int,
        queries: NDArray[np.uint16],
        keys: NDArray[np.uint16],
        values: NDArray[np.uint16],
    ) -> NDArray[np.uint16]:
        if self.on:
            keys, values = np.zeros_like(keys), np.zeros_like(values)
        out: NDArray[np.uint16] = super().attend(layer, queries, keys, values)
        return out


def test_no_other_kv_cache_is_kept(tiny: TinyRun, tmp_path: Path) -> None:
    job = tiny.job("--dir", str(tmp_path / "store"))
    model = Llama.from_gguf(job.file)
    logits = []
    for erase in (True, False):
        with blocking(job.plan.config) as swap, swap.sequence() as sequence:
            attention = Zeroed(sequence)
            attention.on = not erase
            before = model.prefill(job.prompt, attention)
            attention.on = False
            if erase:
                intact = before
                zero_the_cache(swap, sequence)
            logits.append(model.forward([3], len(job.prompt), attention))
    # Everything that the next token sees of the prompt came out of the slots and the store ...
    assert (logits[0] == logits[1]).all()
    # ... and it would have been another answer.
    with blocking(job.plan.config) as swap, swap.sequence() as sequence:
        plain = SwapAttention(sequence)
        assert (model.prefill(job.prompt, plain) == intact).all()
        assert (model.forward([3], len(job.prompt), plain) != logits[0]).any()


def array_bytes(root: object) -> int:
    """Bytes of all NumPy arrays that can be reached from an object, modules and types left out."""
    seen: set[int] = set()
    todo, total = [root], 0
    while todo:
        found = todo.pop()
        if id(found) in seen or isinstance(found, type | type(sys)):
            continue
        seen.add(id(found))
        if isinstance(found, np.ndarray):
            total += found.nbytes
        todo += [o for o in gc.get_referents(found) if not callable(o) or hasattr(o, "attend")]
    return total


def test_nothing_in_the_model_grows_with_the_tokens(tiny: TinyRun) -> None:
    job = tiny.job("--io", "memory")
    model = Llama.from_gguf(job.file)
    sizes = []
    with blocking(job.plan.config) as swap, swap.sequence() as sequence:
        attention = SwapAttention(sequence)
        model.prefill(job.prompt[:20], attention)
        sizes.append(array_bytes(model))
        model.prefill(job.prompt[20:], attention, position=20)
        sizes.append(array_bytes(model))
        assert array_bytes(attention.left_out) == 0
    assert sizes[0] == sizes[1] > 10_000
