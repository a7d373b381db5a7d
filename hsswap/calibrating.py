"""A basis for the predictor ``codes`` from the first prompt that a swap sees.

Keys and values are taken when they are appended and queries when they attend: copies made by the
device, in stream order, into host memory. Once every layer has shown enough, a thread makes the
basis.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from hsswap.appending import Rows
from hsswap.config import LayerGroup, ModelDims, PredictorConfig
from hsswap.driver.base import Buffer, Event, Stream
from hsswap.driver.host_ops import block_views, wide_keys, wide_values
from hsswap.driver.operations import AppendWork, BlockPool, UnitPool
from hsswap.driver.tensor import Tensor, tensor_in
from hsswap.errors import DeviceError
from hsswap.loads import Blocks
from hsswap.loop import in_thread
from hsswap.predictor import CodesPredictor, HeadSamples, calibrate, stand_ins
from hsswap.predictor.calibration import CALIBRATION_TOKENS, QUERY_STEP, SINK_TOKENS
from hsswap.predictor.codes import Learned, PreparedBasis
from hsswap.predictor.keeping import basis_key, load_basis, save_basis
from hsswap.rope import F64
from hsswap.tiers import I64

if TYPE_CHECKING:
    from hsswap.swap_state import SwapState

LEAST_TOKENS = 64
"""Of a prompt that makes a basis when it has to: recall was 0.76 with 128 tokens, 0.79 with 1,024
on a small Llama."""

ROWS = 16  # tokens of a block of the copies

LARGEST = 2.0**30
"""What is learned from is no larger; no model has such. Products of four are a float32 still."""


@dataclass(slots=True)
class _Shown:
    """What one layer has shown: positions ``[n]``, rows ``[n, heads, dk]`` and, of keys that are
    appended, values ``[n, heads, dv]`` a part, and how many rows there are and are on their way.
    ``end``: positions before it were shown.
    """

    positions: list[NDArray[np.int64]] = field(default_factory=list)
    rows: list[NDArray[np.float32]] = field(default_factory=list)
    values: list[NDArray[np.float32]] = field(default_factory=list)
    count: int = 0
    end: int = 0

    def joined(self) -> tuple[NDArray[np.int64], F64]:
        """All positions and rows, float64."""
        return np.concatenate(self.positions), _usable(self.rows)

    def joined_values(self) -> F64 | None:
        """All values, float64, if there are any."""
        return _usable(self.values) if self.values else None


def _usable(parts: list[NDArray[np.float32]]) -> F64:
    """One array of float64. One NaN would be all that is learned, of every head."""
    joined = np.concatenate(parts).astype(np.float64)
    return np.clip(np.where(np.isfinite(joined), joined, 0), -LARGEST, LARGEST)


@dataclass(eq=False, slots=True)
class _Copy:
    """Rows on their way to the host."""

    into: _Shown
    positions: NDArray[np.int64]
    buffer: Buffer
    blocks: BlockPool
    with_values: bool
    event: Event | None = None

    def take(self) -> None:
        """The copy has run: keep its rows."""
        group, count = self.blocks.group, len(self.positions)
        parts, every = block_views(self.blocks), slice(None)
        self.into.rows.append(_by_token(wide_keys(group, parts, every))[:count])
        if self.with_values:
            self.into.values.append(_by_token(wide_values(group, parts, every))[:count])
        self.into.positions.append(self.positions)


def _by_token(blocks: NDArray[np.float32]) -> NDArray[np.float32]:
    """``[B, heads, T, dim]`` as rows ``[B T, heads, dim]``."""
    rows = blocks.swapaxes(1, 2)
    return rows.reshape(-1, *rows.shape[2:])


@dataclass(frozen=True, slots=True)
class _Sample:
    """Rows of keys and values, of E4M3 with their scales, or of queries alone."""

    keys: Tensor
    values: Tensor | None = None
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None

    def every(self, places: NDArray[np.int64]) -> _Sample:
        """Rows at places that are equally far apart."""
        first, step = int(places[0]), int(places[1] - places[0]) if len(places) > 1 else 1
        every = (self.keys, self.values, self.key_scales, self.value_scales)
        keys, *rest = (rows and rows.every(step, first, len(places)) for rows in every)
        assert keys is not None
        return _Sample(keys, *rest)


class Calibration:
    """Collects samples and makes the basis. Made and closed by the swap; runs on its loop.

    One sequence at a time is watched; if it is closed too early, the next prompt is. :meth:`keys`
    and :meth:`queries` are called under the swap's lock, from any thread.
    """

    def __init__(
        self,
        swap: SwapState,
        predictor: CodesPredictor,
        config: PredictorConfig,
        folder: Path | None,
    ) -> None:
        """``folder``: where the basis is kept for the next process, and taken from now. Blocks."""
        self._swap = swap
        self._folder = folder
        self._predictor = predictor
        self._config = config
        self._watched: int | None = None
        self._keys: list[_Shown] = []
        self._queries: list[_Shown] = []
        self._copies: list[_Copy] = []
        self._task: asyncio.Task[None] | None = None
        self._key = basis_key(swap.config.dims, config)
        kept = load_basis(folder, self._key) if folder is not None else None
        if kept is not None:
            predictor.install(predictor.prepare(kept))

    def keys(self, sequence: int, first: int, rows: Rows, stream: Stream) -> None:
        """A sequence is appending rows from position ``first`` on."""
        if self._predictor.ready or self._task is not None:
            return
        if self._watched is None:
            self._watched = sequence
            layers = self._swap.config.dims.layers
            self._keys = [_Shown() for _ in range(layers)]
            self._queries = [_Shown() for _ in range(layers)]
        if self._watched == sequence:
            into = self._keys[rows.cache.layer]
            places = np.arange(min(rows.count, CALIBRATION_TOKENS - into.count))
            sample = _Sample(rows.keys, rows.values, rows.key_scales, rows.value_scales)
            self._copy(into, first, sample, places, stream)

    def queries(
        self, sequence: int, layer: int, first: int, queries: Tensor, stream: Stream
    ) -> None:
        """A sequence's rows ``[n, Q, dk]`` from position ``first`` on attend."""
        if self._predictor.ready or self._task is not None or self._watched != sequence:
            return
        most, into = CALIBRATION_TOKENS // QUERY_STEP, self._queries[layer]
        # A call that had to be made again shows the same rows again.
        begin = max(SINK_TOKENS, first, into.end)
        places = np.arange(begin + -begin % QUERY_STEP - first, queries.shape[0], QUERY_STEP)
        self._copy(into, first, _Sample(queries), places[: most - into.count], stream)
        into.end = max(into.end, first + queries.shape[0])

    def ended(self, sequence: int) -> None:
        """A sequence is closed. Under the lock."""
        if self._watched == sequence and self._task is None:
            self._watched = None
            self._keys, self._queries = [], []

    async def basis(self) -> None:
        """Have a basis if what was shown is enough for one."""
        if self._predictor.ready:
            return
        await self._swap.prefetcher.until(lambda: self._swap.closed or self._may_begin())
        self._swap.check_open()
        if self._task is not None:
            await asyncio.shield(self._task)

    def _may_begin(self) -> bool:
        """Begin, if what was shown is enough; False while some is on its way. Under the lock: no
        thread may show more between the look and the beginning.
        """
        if self._copies:
            return False
        if self._task is None and self._least(self._keys) >= LEAST_TOKENS:
            self._begin()
        return True

    async def basis_of_stored(self, indices: I64) -> None:
        """Have a basis, if nothing else can make one of keys that are stored.

        ``indices`` ``[n]``: the blocks of the first tokens of a sequence, in every layer. Raises
        BlockIOError for one that cannot be read.
        """
        await self.basis()
        dims = self._swap.config.dims
        part = indices[: -(-CALIBRATION_TOKENS // dims.block_size)]
        if self._predictor.ready or len(part) * dims.block_size < SINK_TOKENS + LEAST_TOKENS:
            return
        shown = [await self._stored(layer, part) for layer in range(dims.layers)]
        with self._swap.lock:
            self._swap.check_open()
            if self._task is None and not self._predictor.ready:
                # Copies for whom was watched go nowhere.
                self._keys, self._queries = shown, [_Shown() for _ in shown]
                self._begin()
        await self.basis()

    async def _stored(self, layer: int, indices: I64) -> _Shown:
        """The keys of a layer's blocks."""
        swap, shown = self._swap, _Shown()
        pool, step = swap.pool_of(layer), swap.config.tile_blocks
        for start in range(0, len(indices), step):
            loaded = await swap.prefetcher.load(Blocks(pool, layer, indices[start : start + step]))
            try:
                swap.check_open()
                parts = block_views(pool.blocks)
                rows = _by_token(wide_keys(pool.group, parts, loaded.slots))
            finally:
                swap.release_now(pool, loaded.slots)
            first = shown.count
            shown.count += len(rows)
            shown.rows.append(rows)
            shown.positions.append(np.arange(first, shown.count))
        return shown

    async def settle(self) -> None:
        """Wait for the thread of a swap that is being closed."""
        if self._task is not None:
            await asyncio.wait([self._task])

    def close(self) -> None:
        """Free what nobody will take any more; no copy may be under way."""
        for copy in self._copies:
            copy.buffer.close()
        self._copies.clear()

    def _copy(
        self,
        into: _Shown,
        first: int,
        sample: _Sample,
        places: NDArray[np.int64],
        stream: Stream,
    ) -> None:
        """Copy rows ``places``, which are equally far apart."""
        if not len(places):
            return
        # Rows go into units of a pool of their own, queries, for want of another operation, twice.
        some = sample.every(places)
        values = some.keys if some.values is None else some.values
        _, heads, dim = some.keys.shape
        dtype, kv_dtype = (some.keys.dtype, "") if some.key_scales is None else ("bf16", "e4m3")
        group = LayerGroup(1, heads, heads, dim, values.shape[2], dtype=dtype, kv_dtype=kv_dtype)
        dims, count = ModelDims((group,), ROWS), -(-len(places) // ROWS)
        buffer = self._swap.device.allocate_host(count * dims.block_bytes(group))
        memory = tensor_in(buffer, "u8", (count, dims.block_bytes(group)))
        blocks = BlockPool(memory, group, ROWS)
        copy = _Copy(into, first + places, buffer, blocks, with_values=some.values is not None)
        unit = tensor_in(buffer, "u8", (1, dims.unit_bytes(group)))
        work = AppendWork(
            keys=some.keys,
            values=values,
            first_offset=0,
            units=UnitPool(unit, group, ROWS),
            device_slots=np.full((count, heads), -1, np.int32),
            blocks=blocks,
            host_slots=np.arange(count, dtype=np.int32),
            key_scales=some.key_scales,
            value_scales=some.value_scales,
        )
        try:
            self._swap.device.append(stream, work)
            event = copy.event = stream.record()
        except BaseException:
            self._swap.free_at_close(buffer)  # perhaps it is being filled all the same
            raise
        self._copies.append(copy)
        into.count += len(places)
        event.call_when_done(lambda: self._swap.mailbox.post(lambda: self._arrived(copy)))

    def _arrived(self, copy: _Copy) -> None:
        with self._swap.lock:
            if copy not in self._copies:
                return
            self._copies.remove(copy)
            try:
                assert copy.event is not None
                copy.event.is_done()
                copy.take()
            except DeviceError:
                copy.into.count -= len(copy.positions)  # told to whoever awaits the same work
            copy.buffer.close()
            enough = (
                self._task is None
                and not self._swap.closed
                and self._least(self._keys) >= CALIBRATION_TOKENS
                and self._least(self._queries) >= CALIBRATION_TOKENS // QUERY_STEP
            )
            if enough and not self._copies:
                self._begin()
        self._swap.prefetcher.pump()  # tells who waits in basis()

    @staticmethod
    def _least(shown: list[_Shown]) -> int:
        return min((layer.count for layer in shown), default=0)

    def _begin(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._make())
        # Perhaps nobody waits for it. One that found no memory leaves it to the next prompt.
        self._task.add_done_callback(lambda task: task.cancelled() or task.exception())

    async def _make(self) -> None:
        with_queries = self._least(self._queries) >= LEAST_TOKENS // QUERY_STEP
        try:
            basis = await in_thread(
                lambda: self._predictor.prepare(self._learn(with_queries)), self._drop
            )
            with self._swap.lock:
                self._predictor.install(basis)
            folder = self._folder
            if folder is not None:
                with suppress(OSError):  # a full disk: the next process makes its own
                    await in_thread(lambda: save_basis(folder, self._key, basis.learned))
        finally:
            self._keys, self._queries = [], []
            self._watched = self._task = None

    @staticmethod
    def _drop(basis: PreparedBasis) -> None:
        basis.memory.close()

    def _learn(self, with_queries: bool) -> Learned:
        """The arithmetic, in a thread: what it reads no longer changes."""
        dims, config = self._swap.config.dims, self._config
        heads = []
        for layer, shown in enumerate(self._keys):
            group = dims.group(layer)
            positions, keys = shown.joined()
            is_plain = group.window is None and group.soft_cap is None
            values = shown.joined_values() if is_plain else None
            at, queries = self._queries[layer].joined() if with_queries else (None, None)
            for head in range(group.kv_heads):
                part = slice(head * group.group_size, (head + 1) * group.group_size)
                heads.append(
                    HeadSamples(
                        keys=keys[:, head],
                        values=None if values is None else values[:, head],
                        positions=positions,
                        queries=None if queries is None else queries[:, part],
                        query_positions=at,
                        rope=group.rope,
                        logit_scale=group.logit_scale,
                        group_size=group.group_size,
                        value_dim=group.value_dim,
                    )
                )
        context = config.context_tokens or self._swap.config.capacity_tokens
        codecs = calibrate(heads, config.metadata_ratio, context, config.seed)
        return Learned(tuple(codecs), tuple(stand_ins(heads)))
