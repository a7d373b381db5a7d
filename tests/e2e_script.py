"""A seeded life of ragged sequences, the same on every device, store and size of tiers.

Nothing in it depends on what the swap answers, so two runs of one seed do the same, and their
answers can be compared byte for byte.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from hsswap import HighSpeedSwap, LayerGroup, ModelDims, Sequence, SwapConfig, TopK
from hsswap.config import SPAN_TOKENS, PredictorConfig
from hsswap.driver.base import Buffer, Device
from hsswap.driver.tensor import Tensor, tensor_in
from tests.swap_cases import Case, random_case

DIMS = ModelDims(
    (
        LayerGroup(2, 6, 2, 16),
        LayerGroup(1, 4, 2, 24, 40, kv_dtype="e4m3"),
        LayerGroup(1, 3, 1, 8, window=300),
    ),
    16,
)
BRANCHES = 6
MOST_TOKENS = 7680
"""A sixteenth of six such sequences is what rings of tiles and top-k's caches take on a GPU."""
TOP_K = TopK(2)
NAN = 0x7FC0
MOST_ASKED = 33
ROWS = (1, 1, 1, 2, 3, 9, 17, 40, 300, 1500, 2500, 2500)


def tight(device: str = "host") -> SwapConfig:
    """Device slots for a sixteenth of the blocks, host slots for a quarter."""
    blocks = DIMS.layers * DIMS.blocks_of(BRANCHES * MOST_TOKENS)
    return SwapConfig(
        DIMS,
        capacity_tokens=BRANCHES * (MOST_TOKENS + 64),
        device_slots=blocks // 16,
        host_slots=blocks // 4,
        max_sequences=BRANCHES,
        device=device,
        tile_tokens=SPAN_TOKENS,
        predictor=PredictorConfig("projection", rank=8),
    )


def resident() -> SwapConfig:
    """Everything stays in device slots, but for blocks that forks share."""
    blocks = 2 * DIMS.layers * DIMS.blocks_of(BRANCHES * MOST_TOKENS)
    config = tight()
    return replace(
        config,
        capacity_tokens=4 * config.capacity_tokens,
        device_slots=config.device_slots + blocks + 8 * 64 * len(DIMS.groups),
        host_slots=blocks + 2 * 64 * len(DIMS.groups),
        tile_tokens=1024,
    )


class Desk:
    """A case's K, V and Q, and places for answers, in memory that both CPU and device reach."""

    def __init__(self, device: Device, case: Case) -> None:
        self._device = device
        self._buffers: list[Buffer] = []
        self._outs: list[list[Tensor]] = [[] for _ in case.keys]
        self.case = case
        self.keys = [self._held(array) for array in case.keys]
        self.values = [self._held(array) for array in case.values]
        self.queries = [self._held(array) for array in case.queries]

    def _new(self, shape: tuple[int, ...]) -> Tensor:
        buffer = self._device.allocate_host(2 * int(np.prod(shape)))
        self._buffers.append(buffer)
        return tensor_in(buffer, "bf16", shape)

    def _held(self, array: np.ndarray[tuple[int, ...], np.dtype[np.uint16]]) -> Tensor:
        tensor = self._new(array.shape)
        tensor.array()[...] = array
        return tensor

    def out(self, layer: int, rows: int) -> Tensor:
        """Room for the answer of at most ``MOST_ASKED`` rows, full of NaN."""
        if not self._outs[layer]:
            group = self.case.dims.group(layer)
            self._outs[layer].append(self._new((MOST_ASKED, group.q_heads, group.value_dim)))
        tensor = self._outs[layer].pop()
        tensor.array()[...] = NAN
        return tensor.rows(0, rows)

    def free(self, layer: int, out: Tensor) -> None:
        """An answer has been read."""
        assert isinstance(out.owner, Tensor)
        self._outs[layer].append(out.owner)

    def close(self) -> None:
        """Free everything."""
        for buffer in self._buffers:
            buffer.close()


@dataclass(eq=False)
class Life:
    """One sequence. ``rows``: which rows of the case it holds, in order."""

    sequence: Sequence
    name: int
    rows: list[int] = field(default_factory=list)


@dataclass
class Script:
    """Drives the sequences of a swap. ``log``: (step, sequence, layer) to the answer's bytes."""

    swap: HighSpeedSwap
    desk: Desk
    seed: int
    top_k: TopK | None = None
    streams: tuple[object, ...] = (None,)
    log: dict[tuple[int, int, int], bytes] = field(default_factory=dict)
    lives: list[Life] = field(default_factory=list)
    step: int = 0
    born: int = 0
    forks: int = 0
    cuts: int = 0
    reused: int = 0
    most_lives: int = 0
    most_tokens: int = 0
    """Of all sequences together, at any time."""

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(self.seed)

    def pick(self, below: int) -> int:
        return int(self.random.integers(below))

    async def run(self, steps: int) -> None:
        """So many steps; sequences stay open."""
        for _ in range(steps):
            self.step += 1
            if len(self.lives) < BRANCHES and self.pick(3) == 0:
                self.open()
            elif not self.lives:
                continue
            else:
                await self.act()
            self.most_lives = max(self.most_lives, len(self.lives))
            self.most_tokens = max(self.most_tokens, sum(len(life.rows) for life in self.lives))

    def open(self) -> None:
        """A new sequence."""
        self.born += 1
        self.lives.append(Life(self.swap.sequence(top_k=self.top_k), self.born))

    async def act(self) -> None:
        """Something for one sequence, or rows for two at once."""
        life, kind = self.lives[self.pick(len(self.lives))], self.pick(12)
        if kind == 0:
            if len(self.lives) == BRANCHES:
                gone = next(each for each in self.lives if each is not life)
                self.lives.remove(gone)
                await gone.sequence.close()
            self.born += 1
            self.forks += 1
            stream = self.stream()
            self.lives.append(Life(life.sequence.fork(stream=stream), self.born, list(life.rows)))
        elif kind == 1:
            self.lives.remove(life)
            await life.sequence.close()
        elif kind in (2, 3, 4) and life.rows:
            length = max(0, len(life.rows) - (1 + self.pick(1 + self.pick(60))))
            wait, stream = self.pick(2), self.stream()
            if wait or not life.sequence.try_truncate(length, stream=stream):
                await life.sequence.truncate(length, stream=stream)
            life.rows = life.rows[:length]
            self.cuts += 1
        elif kind == 5:
            await self.swap.flush()
        elif kind == 6 and life.rows:
            await self.reuse(life)
        else:
            other = self.lives[self.pick(len(self.lives))]
            plans = [self.plan(each) for each in {life.name: life, other.name: other}.values()]
            await asyncio.gather(*(self.grow(*plan) for plan in plans))

    def stream(self) -> object:
        return self.streams[self.pick(len(self.streams))]

    def plan(self, life: Life) -> tuple[Life, int, int, object]:
        """How many rows of the case to append, from which on."""
        tokens = self.desk.case.tokens
        rows = min(ROWS[self.pick(len(ROWS))], MOST_TOKENS - len(life.rows))
        return life, self.pick(tokens - max(rows, 1)), rows, self.stream()

    async def grow(self, life: Life, start: int, rows: int, stream: object) -> None:
        """Append rows to every layer and attend the last of them."""
        if rows < 1:
            return
        desk, sequence, step = self.desk, life.sequence, self.step
        asked = min(rows, MOST_ASKED)
        for layer in range(DIMS.layers):
            keys = desk.keys[layer].rows(start, start + rows)
            values = desk.values[layer].rows(start, start + rows)
            if not sequence.try_append(layer, keys, values, stream=stream):
                await sequence.append(layer, keys, values, stream=stream)
            queries = desk.queries[layer].rows(start + rows - asked, start + rows)
            out = desk.out(layer, asked)
            exact = True if (step + layer) % 4 == 0 else None  # also of a sequence in top-k mode
            result = sequence.try_attend(layer, queries, out, exact=exact, stream=stream)
            if result is None:
                result = await sequence.attend(layer, queries, out, exact=exact, stream=stream)
            await result.done()
            self.log[step, life.name, layer] = out.array().tobytes()
            desk.free(layer, out)
        life.rows += range(start, start + rows)

    async def reuse(self, life: Life) -> None:
        """Commit what a sequence has; open it again in its place."""
        whole = await life.sequence.commit(life.rows)
        self.lives.remove(life)
        await life.sequence.close()
        again = await self.swap.open_prefix(life.rows, top_k=life.sequence.top_k)
        assert again.length == whole
        self.reused += 1
        self.born += 1
        self.lives.append(Life(again, self.born, life.rows[:whole]))

    async def end(self) -> None:
        """Close what is open."""
        for life in self.lives:
            await life.sequence.close()
        self.lives.clear()


def make_case(seed: int = 5) -> Case:
    """Rows for everybody."""
    return random_case(DIMS, 2600, seed)
