"""Actors that grow families of sequences: append, ask, fork, cut, reserve, commit, cancel.

A sequence's rows are those of one base up to a cut, and of another behind it. So the right answers
of every sequence that can come about are few, and were computed alone, with everything resident.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from hsswap import HighSpeedSwap, Sequence
from hsswap.io.memory import MemoryIO
from tests.branches import alone
from tests.places import Places
from tests.storming import CALM, Raging
from tests.swap_cases import U16, Case, config_for
from tests.swap_watch import turns

CUTS = (45, 96, 203, 400)
MOST = 560
Kind = tuple[int, int, int]
"""(base, cut, base behind the cut); the same base twice with cut 0 for one that was never cut."""


def kinds_of(bases: int) -> list[Kind]:
    """All that can come about."""
    pairs = [(a, b) for a in range(bases) for b in range(bases) if a != b]
    return [(a, 0, a) for a in range(bases)] + [(a, cut, b) for a, b in pairs for cut in CUTS]


def rows_of_kind(kind: Kind, start: int, stop: int) -> list[int]:
    """Rows of the case, which holds the bases one behind the other."""
    first, cut, second = kind
    return [(first if n < cut else second) * MOST + n for n in range(start, stop)]


async def truths(case: Case, device: str = "host") -> dict[Kind, list[U16]]:
    """The answers of every kind, alone, with everything resident."""
    kinds = kinds_of(case.tokens // MOST)
    if device == "host":
        return {kind: await alone(case, rows_of_kind(kind, 0, MOST)) for kind in kinds}
    config = config_for(case, tile_tokens=1024, extra_device=200, sequences=1)
    found = {}
    async with HighSpeedSwap.open(replace(config, device=device), io=MemoryIO()) as swap:
        places = Places(swap.device)
        for kind in kinds:
            rows, answers = rows_of_kind(kind, 0, MOST), []
            async with swap.sequence() as sequence:
                for layer in range(case.dims.layers):
                    await sequence.append(layer, case.keys[layer][rows], case.values[layer][rows])
                    queries, group = case.queries[layer][rows], case.dims.group(layer)
                    out, array = places.new((MOST, group.q_heads, group.value_dim))
                    await (await sequence.attend(layer, queries, out)).done()
                    answers.append(array.copy())
            found[kind] = answers
        await asyncio.to_thread(places.close)
    return found


@dataclass(eq=False)
class Line:
    """A sequence and what it holds."""

    sequence: Sequence
    kind: Kind


@dataclass(eq=False)
class Grower(Raging):
    """One task of a storm. ``calls`` counts answers that were compared."""

    swap: HighSpeedSwap
    case: Case
    right: Mapping[Kind, list[U16]]
    seed: int
    places: Places
    calls: int = 0
    done: int = 0
    lines: list[Line] = field(default_factory=list)

    async def end(self) -> None:
        for line in list(self.lines):
            await self.close(line)

    async def act(self) -> None:
        """Something, for one of the sequences."""
        if not self.lines:
            base = self.pick(self.case.tokens // MOST)
            self.lines.append(Line(self.swap.sequence(), (base, 0, base)))
        line, what = self.lines[self.pick(len(self.lines))], self.pick(16)
        if what < 5:
            await self.grow(line, 1 + self.pick(1 + self.pick(120)))
        elif what < 9:
            await self.ask(line)
        elif what < 11:
            await self.cut(line)
        elif what == 11 and len(self.lines) < 3:
            self.lines.append(replace(line, sequence=line.sequence.fork()))
        elif what == 12:
            await self.close(line)
        elif what == 13:
            await self.ask_all()
        elif what == 14:
            await self.maybe_cancelled(line.sequence.reserve(1 + self.pick(20)))
        elif self.pick(3) == 0:
            await self.maybe_cancelled(self.swap.flush())
        else:
            rows = rows_of_kind(line.kind, 0, line.sequence.length)
            await self.maybe_cancelled(line.sequence.commit(rows[: self.pick(200)]))

    async def grow(self, line: Line, rows: int) -> None:
        """Append to every layer; a part that fails for want of room is tried again, or the sequence
        is closed.
        """
        sequence = line.sequence
        stop = min(MOST, sequence.length + rows)
        for layer in range(self.case.dims.layers):
            for _ in range(40):
                start = sequence.layer_length(layer)
                if start >= stop:
                    break
                part = rows_of_kind(line.kind, start, stop)
                keys, values = self.case.keys[layer][part], self.case.values[layer][part]
                with suppress(*CALM):
                    if self.pick(3) or not sequence.try_append(layer, keys, values):
                        await self.maybe_cancelled(sequence.append(layer, keys, values))
                await turns(self.pick(6))
            else:
                await self.close(line)
                return

    async def ask(self, line: Line) -> None:
        """Attend the last rows of a layer."""
        sequence, layer = line.sequence, self.pick(self.case.dims.layers)
        end = sequence.layer_length(layer)
        rows = min(end, 1 + self.pick(12))
        if not rows:
            return
        queries = self.case.queries[layer][rows_of_kind(line.kind, end - rows, end)]
        wanted = self.right[line.kind][layer][end - rows : end]
        out, answer = self.places.new(wanted.shape)
        result = sequence.try_attend(layer, queries, out) if self.pick(3) == 0 else None
        if result is None:
            result = await self.maybe_cancelled(sequence.attend(layer, queries, out))
        if result is not None:
            await result.done()
            assert (answer == wanted).all(), f"grower {self.seed}: a wrong answer of {line.kind}"
            self.calls += 1

    async def ask_all(self) -> None:
        """One row of all sequences, in one call."""
        layer = self.pick(self.case.dims.layers)
        lines = [line for line in self.lines if line.sequence.layer_length(layer)]
        if not lines:
            return
        ends = [line.sequence.layer_length(layer) for line in lines]
        places = list(zip(lines, ends, strict=True))
        rows = [rows_of_kind(line.kind, end - 1, end)[0] for line, end in places]
        wanted = np.stack([self.right[line.kind][layer][end - 1] for line, end in places])
        out, answer = self.places.new(wanted.shape)
        sequences = [line.sequence for line in lines]
        call = self.swap.attend_batch(layer, sequences, self.case.queries[layer][rows], out)
        results = await self.maybe_cancelled(call)
        for result in results or ():
            await result.done()
        if results is not None:
            assert (answer == wanted).all(), f"grower {self.seed}: a wrong answer of a batch"
            self.calls += len(results)

    async def cut(self, line: Line) -> None:
        """Cut a sequence anywhere, or at one of the cuts to go on as another."""
        sequence, (first, cut, _) = line.sequence, line.kind
        longest = sequence.length
        target = self.pick(longest + 1)
        if cut == 0 and self.pick(2):
            target = CUTS[self.pick(len(CUTS))]
            bases = self.case.tokens // MOST
            line_kind = (first, target, (first + 1 + self.pick(bases - 1)) % bases)
        else:
            line_kind = line.kind if target > cut else (first, 0, first)
        if target > longest:
            return
        for _ in range(60):
            with suppress(*CALM):
                if self.pick(3) == 0 and sequence.try_truncate(target):
                    break
                try:
                    await self.shaken(sequence.truncate(target))
                    break
                except asyncio.CancelledError:
                    continue
        else:
            await self.close(line)
            return
        line.kind = line_kind

    async def close(self, line: Line) -> None:
        """Close, at times in two attempts of which the first is cancelled."""
        if line in self.lines:
            self.lines.remove(line)
        with suppress(asyncio.CancelledError):
            await self.shaken(line.sequence.close())
        await line.sequence.close()

    async def maybe_cancelled(self, call: Coroutine[Any, Any, Any]) -> Any:
        """The result, or None for a call that was cancelled on the way."""
        try:
            return await self.shaken(call)
        except asyncio.CancelledError:
            return None

    async def shaken(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Run a call, cancelled at times after a moment."""
        task = asyncio.ensure_future(call)
        if self.pick(6) == 0:
            await turns(self.pick(25))
            task.cancel()
            await asyncio.wait([task])
        return await task
