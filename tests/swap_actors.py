"""Actors of a storm: each drives sequences of its own by a seeded script and checks every answer.

What is right was computed before, alone and with everything resident; exact answers do not depend
on chunks, so any rows at any length can be compared, and top-k's for the rows that were computed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Several
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hsswap import HighSpeedSwap, ModelDims, Sequence, TopK
from hsswap.attending import AttendResult
from hsswap.config import SwapConfig
from hsswap.errors import HsswapError, OutOfSlots
from hsswap.io.memory import MemoryIO
from tests.storming import CALM
from tests.swap_cases import U16, Case, chunks_of, config_for, feed, random_case
from tests.swap_watch import turns

NAN = 0x7FC0


@dataclass(frozen=True)
class Truth:
    """A case and its right answers: ``exact[layer]`` for all rows, ``chosen[layer]`` for the rows
    from ``start`` on, in top-k mode.
    """

    case: Case
    exact: list[U16]
    start: int
    chosen: list[U16]


def roomy(case: Case, top_k: TopK | None = None, sequences: int = 1) -> SwapConfig:
    """Everything stays in device slots, and top-k's caches fit too."""
    blocks = case.dims.layers * (case.tokens // case.dims.block_size + 1)
    caches = 0 if top_k is None else case.dims.layers * top_k.cache_blocks(case.dims.block_size)
    more = sequences * (blocks + caches) * len(case.dims.groups)
    return config_for(case, extra_device=more, extra_host=more, sequences=sequences)


async def truth_of(dims: ModelDims, tokens: int, seed: int, top_k: TopK, decoded: int) -> Truth:
    """Compute the answers of a random case: once exactly, once in top-k mode for the last rows."""
    case = random_case(dims, tokens, seed)
    start = tokens - decoded
    async with HighSpeedSwap.open(roomy(case, top_k), io=MemoryIO()) as swap:
        async with swap.sequence() as sequence:
            exact = await feed(sequence, case, [tokens])
        async with swap.sequence(top_k=top_k) as sequence:
            chosen = await feed(sequence, case, [start, *chunks_of(decoded, 1)])
    return Truth(case, exact, start, [rows[start:] for rows in chosen])


@dataclass
class Actor:
    """One caller. ``streams``: what it hands in, at random. ``cancels``: whether it cancels some of
    its calls. ``calls`` counts the answers that were compared.
    """

    swap: HighSpeedSwap
    truths: Several[Truth]
    top_k: TopK
    seed: int
    streams: Several[object] = (None,)
    cancels: bool = True
    calls: int = 0
    refused: int = 0
    pending: list[tuple[AttendResult, U16]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def pick(self, below: int) -> int:
        return int(self.random.integers(below))

    async def run(self, lives: int) -> None:
        """Open, fill, ask and close ``lives`` sequences one after the other."""
        for _ in range(lives):
            truth = self.truths[self.pick(len(self.truths))]
            chooses = self.pick(3) == 0
            try:
                sequence = self.swap.sequence(top_k=self.top_k if chooses else None)
            except OutOfSlots:
                self.refused += 1
                await turns(20)
                continue
            try:
                with suppress(*CALM):
                    await (self.decode if chooses else self.live)(sequence, truth)
                if self.pick(2):
                    await self.compare()
            finally:
                await self.leave(sequence)
            await self.compare()  # answers must not need a sequence that is open

    async def live(self, sequence: Sequence, truth: Truth) -> None:
        """Exact mode: chunks of any size, questions of any size, in any layer, in between."""
        case, stop = truth.case, 1 + self.pick(truth.case.tokens)
        while sequence.length < stop:
            if self.pick(8) == 0:
                with suppress(*CALM):
                    await self.swap.flush()
            rows = min(stop - sequence.length, 1 + self.pick(self.pick(400) + 1))
            end = sequence.length + rows
            for layer in range(case.dims.layers):
                await self.append(sequence, case, layer, end)
                if self.pick(3):
                    await self.ask(sequence, truth, layer, 1 + self.pick(min(rows, 40)))
        for _ in range(self.pick(4)):
            await self.ask(sequence, truth, self.pick(case.dims.layers), 1 + self.pick(stop))

    async def decode(self, sequence: Sequence, truth: Truth) -> None:
        """Top-k mode: rows one by one behind a prefill, and exact questions in between."""
        case = truth.case
        for end in range(truth.start, case.tokens + 1):
            for layer in range(case.dims.layers):
                await self.append(sequence, case, layer, end)
                if end > truth.start:
                    await self.ask(sequence, truth, layer, 1, chosen=self.pick(4) > 0)

    async def append(self, sequence: Sequence, case: Case, layer: int, end: int) -> None:
        """Append up to ``end``; a call that was cancelled goes on where it stopped."""
        while (start := sequence.layer_length(layer)) < end:
            keys, values = case.keys[layer][start:end], case.values[layer][start:end]
            stream = self.streams[self.pick(len(self.streams))]
            if self.pick(4) == 0 and sequence.try_append(layer, keys, values, stream=stream):
                continue
            call = asyncio.ensure_future(sequence.append(layer, keys, values, stream=stream))
            await self.maybe_cancel(call)
            with suppress(asyncio.CancelledError):
                await call

    async def ask(
        self, sequence: Sequence, truth: Truth, layer: int, rows: int, *, chosen: bool = False
    ) -> None:
        """Attend the last rows of a layer, and compare now or later."""
        end = sequence.layer_length(layer)
        rows = min(rows, end)
        part = slice(end - rows, end)
        wanted = truth.exact[layer][part]
        if chosen:
            wanted = truth.chosen[layer][end - 1 - truth.start : end - truth.start]
        queries = truth.case.queries[layer][part]
        out = np.full(wanted.shape, NAN, np.uint16)
        stream = self.streams[self.pick(len(self.streams))]
        result: AttendResult | None = None
        if not chosen and self.pick(3) == 0:
            result = sequence.try_attend(layer, queries, out, exact=True, stream=stream)
        if result is None:
            exact = None if chosen else True
            call = asyncio.ensure_future(
                sequence.attend(layer, queries, out, exact=exact, stream=stream)
            )
            await self.maybe_cancel(call)
            try:
                result = await call
            except asyncio.CancelledError:
                return
        self.pending.append((result, wanted))
        if len(self.pending) > self.pick(4):
            await self.compare()

    async def maybe_cancel(self, call: asyncio.Task[Any]) -> None:
        if self.cancels and self.pick(6) == 0:
            await turns(self.pick(30))
            call.cancel()
            await asyncio.wait([call])

    async def compare(self) -> None:
        """Wait for the answers that are pending and hold them against the right ones."""
        while self.pending:
            result, wanted = self.pending.pop()
            await result.done()
            assert isinstance(result.out, np.ndarray)
            assert (result.out == wanted).all(), f"actor {self.seed}: a wrong answer"
            self.calls += 1

    async def leave(self, sequence: Sequence) -> None:
        """Close, at times in two attempts of which the first is cancelled."""
        call = asyncio.ensure_future(sequence.close())
        await self.maybe_cancel(call)
        with suppress(asyncio.CancelledError):
            await call
        await sequence.close()


def is_typed(end: object) -> bool:
    """Whether an actor ended well or with an error of ours."""
    return end is None or isinstance(end, HsswapError)
