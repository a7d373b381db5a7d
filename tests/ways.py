"""Every call of a sequence as a way to break one, and what must hold afterwards.

For tests that have something fail, or end, in the middle of a call. Afterwards the sequence answers
as ever, bit for bit, or says with a typed error that it can only be closed; another sequence of the
swap does not notice; and at the end nothing is held by anyone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest

from hsswap import HighSpeedSwap, HsswapError, LayerGroup, ModelDims, Sequence, SwapConfig, TopK
from hsswap.driver.base import Device
from hsswap.driver.host import HostDevice
from hsswap.io.waiting import to_the_end
from hsswap.loop import insist
from tests.branches import alone
from tests.swap_cases import U16, Case, config_for, random_case
from tests.swap_watch import Linked, turns, watched, within

PLAIN = random_case(ModelDims.uniform(layers=2, q_heads=2, kv_heads=1, head_dim=8), 420, seed=61)
MIXED = random_case(
    ModelDims(
        (LayerGroup(2, 2, 1, 8, kv_dtype="e4m3"), LayerGroup(1, 2, 1, 8, 16, window=200)),
    ),
    420,
    seed=62,
)
"""Two layers of E4M3, and one with a window in slots of its own."""
START = 328
"""Tokens before the fault: 20 full blocks and half of one."""
TOP_K = TopK(2)
NAN = 0x7FC0


@dataclass
class Bench:
    """A swap with one sequence that a call may break, and ``other``, which it must not."""

    swap: HighSpeedSwap
    case: Case
    sequence: Sequence
    other: Sequence
    made: list[Sequence] = field(default_factory=list)

    async def grow(self, stop: int) -> None:
        """Append to every layer up to ``stop`` tokens, whatever there is already."""
        for layer in range(self.case.dims.layers):
            start = self.sequence.layer_length(layer)
            keys, values = self.case.keys[layer][start:stop], self.case.values[layer][start:stop]
            if len(keys):
                await self.sequence.append(layer, keys, values)

    def try_grow(self, stop: int) -> None:
        for layer in range(self.case.dims.layers):
            start = self.sequence.layer_length(layer)
            keys, values = self.case.keys[layer][start:stop], self.case.values[layer][start:stop]
            assert self.sequence.try_append(layer, keys, values)

    def try_truncate(self, length: int) -> None:
        assert self.sequence.try_truncate(length)

    async def ask(self, rows: int, exact: bool | None = None) -> None:
        for layer in range(self.case.dims.layers):
            part = slice(START - rows, START)
            result = await self.sequence.attend(layer, self.case.queries[layer][part], exact=exact)
            await result.done()

    async def batch(self) -> None:
        out = np.full((2, 2, 8), NAN, np.uint16)
        rows = self.case.queries[0][[START - 1, 99]]
        for result in await self.swap.attend_batch(0, [self.sequence, self.other], rows, out):
            await result.done()

    def fork(self) -> None:
        self.made.append(self.sequence.fork())

    async def capture(self, length: int, *, settles: bool = False) -> None:
        async with self.sequence.captured(40, rows=13) as steps:
            for start in range(START, length, 13):
                part = slice(start, start + 13)
                for layer in range(self.case.dims.layers):
                    steps.append(layer, self.case.keys[layer][part], self.case.values[layer][part])
                steps.advance(13)
                if settles:
                    steps.stream.synchronize()
                    steps.settle(start + 13)
            steps.finish(length)

    async def offload(self) -> None:
        ids = [await self.swap.alloc_disk_block_id() for _ in range(3)]
        try:
            for number, block in enumerate(ids):
                part = slice(16 * number, 16 * number + 16)
                await self.swap.offload_block(
                    layer=0,
                    block=block,
                    k_block_host=self.case.keys[0][part],
                    v_block_host=self.case.values[0][part],
                    valid_tokens=16 if number < 2 else 5,
                )
            out = np.full((2, 8), NAN, np.uint16)
            result = await self.swap.attend_layer(
                layer=0, seq_block_ids=ids, q_dev=self.case.queries[0][0], output_dev=out
            )
            await result.done()
        finally:
            await to_the_end(*(partial(self._drop, block) for block in ids))

    async def offload_again(self) -> None:
        block = await self.swap.alloc_disk_block_id()
        try:
            for start in (0, 40, 80):
                await self.swap.offload_block(
                    layer=0,
                    block=block,
                    k_block_host=self.case.keys[0][start : start + 16],
                    v_block_host=self.case.values[0][start : start + 16],
                    valid_tokens=16 if start < 80 else 5,
                )
        finally:
            await self._drop(block)

    async def _drop(self, block: int) -> None:
        """Also when this is cancelled, or the device refuses something: then once more."""
        with suppress(HsswapError):
            return await insist(lambda: self.swap.dec_disk_ref(block=block))
        await insist(lambda: self.swap.dec_disk_ref(block=block))

    async def reopen(self) -> None:
        tokens = range(START)
        await self.sequence.commit(list(tokens))
        self.made.append(await self.swap.open_prefix(list(tokens), top_k=self.sequence.top_k))


@dataclass(frozen=True)
class Way:
    """A call, in which mode, on which device; ``evicted``: blocks are on disk only before it."""

    name: str
    call: Callable[[Bench], Awaitable[Any] | None]
    top_k: TopK | None = None
    device: type[Device] = HostDevice
    evicted: bool = False


WAYS = [
    Way("append", lambda b: b.grow(START + 60)),
    Way("append, top-k", lambda b: b.grow(START + 60), TOP_K),
    Way("try_append", lambda b: b.try_grow(START + 20)),
    Way("attend", lambda b: b.ask(1), evicted=True),
    Way("attend, held", lambda b: b.ask(1)),
    Way("attend, many rows", lambda b: b.ask(30), evicted=True),
    Way("attend through the ring", lambda b: b.ask(30), device=Linked, evicted=True),
    Way("attend, top-k", lambda b: b.ask(1), TOP_K),
    Way("attend, top-k, evicted", lambda b: b.ask(1), TOP_K, evicted=True),
    Way("attend, top-k, late", lambda b: b.ask(1), TopK(2, late_mass=0.2), evicted=True),
    Way("attend exactly in top-k mode", lambda b: b.ask(1, True), TOP_K),
    Way("attend_batch", lambda b: b.batch()),
    Way("attend_batch, evicted", lambda b: b.batch(), evicted=True),
    Way("truncate in the active block", lambda b: b.sequence.truncate(START - 3)),
    Way("truncate at a block", lambda b: b.sequence.truncate(160)),
    Way("truncate inside a block", lambda b: b.sequence.truncate(101)),
    Way("truncate inside a block on disk", lambda b: b.sequence.truncate(101), evicted=True),
    Way("truncate, top-k", lambda b: b.sequence.truncate(101), TOP_K),
    Way("try_truncate", lambda b: b.try_truncate(START - 3)),
    Way("try_truncate inside a block", lambda b: b.try_truncate(300)),
    Way("fork", lambda b: b.fork()),
    Way("fork, top-k", lambda b: b.fork(), TOP_K),
    Way("captured, nothing done", lambda b: b.capture(START)),
    Way("captured, blocks filled", lambda b: b.capture(START + 39)),
    Way("captured, blocks final", lambda b: b.capture(START + 39, settles=True)),
    Way("captured, top-k", lambda b: b.capture(START), TOP_K),
    Way("captured, evicted", lambda b: b.capture(START), evicted=True),
    Way("look_ahead", lambda b: b.sequence.look_ahead(0, b.case.queries[0][:1]), TOP_K),
    Way("reserve", lambda b: b.sequence.reserve(60)),
    Way("commit and open", lambda b: b.reopen()),
    Way("commit and open, top-k", lambda b: b.reopen(), TOP_K),
    Way("blocks by id", lambda b: b.offload()),
    Way("a block by id, again", lambda b: b.offload_again()),
    Way("close", lambda b: b.sequence.close()),
    Way("close, top-k", lambda b: b.sequence.close(), TOP_K),
]


def config_of(case: Case) -> SwapConfig:
    """Some blocks stay in device slots, all fit the host tier."""
    more = 8 + 4 * case.dims.layers * TOP_K.cache_blocks(16)
    return config_for(case, sequences=4, extra_device=more, extra_host=120)


RIGHT: dict[int, list[U16]] = {}


async def right(case: Case) -> list[U16]:
    """All answers of a case, alone."""
    if id(case) not in RIGHT:
        RIGHT[id(case)] = await alone(case, list(range(case.tokens)))
    return RIGHT[id(case)]


async def fill(sequence: Sequence, case: Case, stop: int) -> None:
    for layer in range(case.dims.layers):
        await sequence.append(layer, case.keys[layer][:stop], case.values[layer][:stop])


async def evict(swap: HighSpeedSwap) -> None:
    """Have the host tier hold nothing that is clean and unused, nor what a sequence holds."""
    with swap.lock:
        for pool in swap.pool:
            pool.holders.ask_back()
    await turns(3)
    with swap.lock:
        for pool in swap.pool:
            tier = pool.tier
            tier.discard(np.flatnonzero((tier.state == 2) & (tier.leases == 0)).astype(np.int32))


async def check_answers(case: Case, sequence: Sequence, rows: int = 3) -> None:
    """The last rows of every layer are as they must be, exactly."""
    wanted = await right(case)
    for layer in range(case.dims.layers):
        end = sequence.layer_length(layer)
        part = slice(max(0, end - rows), end)
        if end:
            result = await sequence.attend(layer, case.queries[layer][part], exact=True)
            await result.done()
            assert (np.asarray(result.out) == wanted[layer][part]).all(), f"layer {layer} at {end}"


async def check_afterwards(bench: Bench) -> None:
    """The sequence works on, after a truncate if it says so, or says that it can only be closed."""
    case, sequence = bench.case, bench.sequence
    if sequence.closed:
        return
    try:
        await check_answers(case, sequence)
    except HsswapError as error:
        if "truncate again" in str(error):
            assert sequence._cut_to is not None
            await sequence.truncate(sequence._cut_to)
        else:
            await check_broken(case, sequence)
            return
    await check_answers(case, sequence)
    await bench.grow(min(case.tokens, sequence.length + 40))
    await check_answers(case, sequence)


async def check_broken(case: Case, sequence: Sequence) -> None:
    """Every call says what can be done."""
    for call in (lambda: sequence.attend(0, case.queries[0][:1]), lambda: sequence.reserve(1)):
        with pytest.raises(HsswapError, match="close it"):
            await call()
    with pytest.raises(HsswapError, match="close it"):
        sequence.fork()


@asynccontextmanager
async def ready(way: Way, case: Case) -> AsyncIterator[Bench]:
    """A swap of its own, filled, for one call; all that must hold is checked at the end."""
    async with watched(config_of(case), device=way.device()) as swap:
        bench = Bench(swap, case, swap.sequence(top_k=way.top_k), swap.sequence())
        await fill(bench.sequence, case, START)
        await fill(bench.other, case, 100)
        await swap.flush()
        if way.top_k is not None:
            await bench.ask(1)
        if way.evicted:
            await swap.writes.settle()
            await bench.ask(1, True)
            await evict(swap)
        yield bench
        await within(lambda: check_afterwards(bench))
        await within(lambda: check_answers(case, bench.other))
        for sequence in [*bench.made, bench.sequence]:
            await within(sequence.close)
        await within(swap.flush)
        await within(lambda: check_answers(case, bench.other))
