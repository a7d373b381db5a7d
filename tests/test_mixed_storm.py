"""Everything at once on one persistent swap that is opened again and again: sequences of both
modes, of a cache in three formats, that grow, fork, are cut, committed, found again by their
tokens, captured, looked ahead for and cancelled, while the disk is slow at times or fails.

Exact answers are bit for bit those of a sequence alone. Bounded by operations, never by time.
"""

from __future__ import annotations

import asyncio
import errno
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, PredictorConfig, TopK
from hsswap.bf16 import to_float32
from hsswap.driver.host import HostDevice
from hsswap.errors import BlockIOError
from hsswap.io.memory import Fault, FaultKind, MemoryIO
from tests.branch_actors import MOST, Grower, Kind, Line, rows_of_kind, truths
from tests.branches import rows_of
from tests.captured_engine import NAN, Engine
from tests.places import Places
from tests.storming import storm
from tests.swap_cases import U16, config_for, random_case
from tests.swap_watch import Linked, poison, turns, within

DIMS = ModelDims(
    (
        LayerGroup(2, 2, 1, 8, kv_dtype="e4m3"),
        LayerGroup(1, 2, 1, 8, 16, window=200),
        LayerGroup(1, 4, 2, 16, 8, soft_cap=15.0),
    )
)
CASE = random_case(DIMS, 3 * MOST, seed=17)
MODES = [None, TopK(2), TopK(3, late_mass=0.2)]
TASKS, OPERATIONS, TIMES = 10, 40, 2
LIMIT_S = 90.0
TRUTHS: dict[Kind, list[U16]] = {}


class Mixed(Grower):
    """A grower that does more, and asks exactly unless it asks for what is chosen."""

    found = captured = answered = 0

    async def act(self) -> None:
        if not self.lines:
            base = self.pick(CASE.tokens // MOST)
            await self.find((base, 0, base))
            return
        line, what = self.lines[self.pick(len(self.lines))], self.pick(12)
        if what == 0:
            await self.capture(line)
        elif what == 1 and len(self.lines) < 3:
            await self.find(line.kind)
        elif what in (2, 3) and line.sequence.length:
            await self.ask_in_mode(line, ahead=what == 2)
        else:
            await super().act()

    async def find(self, kind: Kind) -> None:
        """A sequence with what is stored of these rows."""
        rows = rows_of_kind(kind, 0, 1 + self.pick(MOST))
        sequence = await self.swap.open_prefix(rows, top_k=MODES[self.pick(len(MODES))])
        self.found += bool(sequence.length)
        first, cut, _ = kind
        self.lines.append(Line(sequence, kind if sequence.length > cut else (first, 0, first)))

    async def ask_in_mode(self, line: Line, *, ahead: bool) -> None:
        """One row as the sequence answers it; what top-k chooses is for other tests."""
        layer = self.pick(DIMS.layers)
        end = line.sequence.layer_length(layer)
        if not end:
            return
        row = CASE.queries[layer][rows_of_kind(line.kind, end - 1, end)]
        if ahead:
            await self.maybe_cancelled(line.sequence.look_ahead(layer, row))
            return
        result = await self.maybe_cancelled(line.sequence.attend(layer, row))
        if result is not None:
            await result.done()
            assert np.isfinite(to_float32(np.asarray(result.out))).all()
            self.answered += 1

    async def ask(self, line: Line) -> None:
        """The last rows of a layer, exactly."""
        sequence, layer = line.sequence, self.pick(DIMS.layers)
        end = sequence.layer_length(layer)
        rows = min(end, 1 + self.pick(12))
        if not rows:
            return
        queries = CASE.queries[layer][rows_of_kind(line.kind, end - rows, end)]
        wanted = self.right[line.kind][layer][end - rows : end]
        out, answer = self.places.new(wanted.shape)
        result = None
        if self.pick(3) == 0:
            result = sequence.try_attend(layer, queries, out, exact=True)
        if result is None:
            call = sequence.attend(layer, queries, out, exact=True)
            result = await self.maybe_cancelled(call)
        if result is not None:
            await result.done()
            assert (answer == wanted).all(), f"mixed {self.seed}: a wrong answer of {line.kind}"
            self.calls += 1

    async def ask_all(self) -> None:
        """Batches are for other storms: here sequences of both modes meet."""

    async def capture(self, line: Line) -> None:
        """Steps of some rows, of which some are rejected."""
        sequence = line.sequence
        lengths = {sequence.layer_length(layer) for layer in range(DIMS.layers)}
        rows, tokens, first = 1 + self.pick(8), 1 + self.pick(60), max(lengths)
        if len(lengths) > 1 or first + tokens > MOST:
            return
        engine = Engine(self.swap, CASE, rows)
        try:
            async with sequence.captured(tokens, rows=rows, stream=engine.stream) as steps:
                at = first
                while at + rows <= first + tokens:
                    part = rows_of(CASE, rows_of_kind(line.kind, at, at + rows))
                    for layer in range(DIMS.layers):
                        engine.keys[layer][...] = part.keys[layer]
                        engine.values[layer][...] = part.values[layer]
                        engine.queries[layer][...] = part.queries[layer]
                        out = engine.out[layer]
                        out[...] = NAN
                        taken = engine.keys[layer], engine.values[layer]
                        steps.append(layer, *taken, stream=engine.stream)
                        queries = engine.queries[layer]
                        steps.attend(layer, queries, out, exact=True, stream=engine.stream)
                    accepted = 1 + self.pick(rows)
                    steps.advance(accepted, stream=engine.stream)
                    await asyncio.to_thread(engine.stream.synchronize)
                    for layer, out in enumerate(engine.out):
                        wanted = self.right[line.kind][layer][at : at + rows]
                        assert (out == wanted).all(), f"mixed {self.seed}: a wrong captured answer"
                    at += accepted
                    self.captured += 1
                    if self.pick(3) == 0:
                        steps.settle(at)
                    await turns(self.pick(4))
                steps.finish(at)
        finally:
            await asyncio.to_thread(engine.close)


def faulty(random: np.random.Generator, files: dict[Path, NDArray[np.uint8]]) -> MemoryIO:
    """What was on disk, on a drive with bad moments."""
    script = []
    kinds = (FaultKind.ERRNO, FaultKind.FLIP, FaultKind.SHORT)
    for _ in range(10):
        kind, at = kinds[int(random.integers(3))], int(random.integers(40 * OPERATIONS))
        bit = int(random.integers(1 << 15))
        script.append(Fault(kind, at=at, count=1 + at % 3, only="read", bit=bit))
    at = int(random.integers(20 * OPERATIONS))
    script.append(Fault(FaultKind.ERRNO, at=at, count=12, only="write", errno=errno.ENOSPC))
    script.append(Fault(FaultKind.ERRNO, at=int(random.integers(200)), count=3, only="sync"))
    return MemoryIO(script, files=files)


@pytest.mark.parametrize(("seed", "fails"), [(1, False), (2, True), (3, True)])
async def test_a_storm_of_everything(seed: int, fails: bool) -> None:
    if not TRUTHS:
        TRUTHS.update(await truths(CASE))
    random = np.random.default_rng(seed)
    config = config_for(
        CASE,
        sequences=TASKS + 8,
        capacity=TASKS // 3 * MOST,
        extra_device=(TASKS + 8) * 5 * 8 + int(random.integers(60)),
        extra_host=(20, 120, 400)[seed % 3],
    )
    predictor = PredictorConfig("projection") if seed % 2 else PredictorConfig()
    config = replace(config, persist=True, io="memory", predictor=predictor)
    files: dict[Path, NDArray[np.uint8]] = {}
    actors: list[Mixed] = []
    for number in range(TIMES):
        io = faulty(random, files) if fails else MemoryIO(files=files)
        device = Linked() if seed == 3 else HostDevice()
        swap = await HighSpeedSwap.create(config, io=io, device=device)
        poison(swap)
        places = Places(swap.device)
        mine = [
            Mixed(swap, CASE, TRUTHS, 1000 * seed + 100 * number + n, places) for n in range(TASKS)
        ]
        actors += mine
        await storm(mine, OPERATIONS, LIMIT_S)
        await asyncio.to_thread(places.close)
        assert swap.statistics().host_slots_used == 0
        assert not any(pool.tier.leases.any() for pool in swap.pool)
        try:
            await within(swap.close)
        except BlockIOError:
            assert fails
        assert device.live_count == 0
        files = {path: file.content for path, file in io._by_path.items()}
    assert sum(actor.done for actor in actors) == OPERATIONS * len(actors)
    assert sum(actor.calls for actor in actors) > 50
    for count in ("found", "captured", "answered"):
        assert sum(getattr(actor, count) for actor in actors) > 5, count
