"""Blocks by id: offload whole blocks, attend a list of ids, count references.

The surface this project started from, for engines that keep block tables of their own. What
:class:`hsswap.Sequence` does for its callers is theirs here: which ids, in which order, how many
tokens of the last block. All calls but the plain ones are awaited; nothing blocks the loop.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from hsswap.arguments import block_tensor, checked_layer, checked_length, e4m3_tensors
from hsswap.attending import AttendResult, Query, attend_exact
from hsswap.coding import enqueue_codes
from hsswap.driver.base import Stream
from hsswap.driver.operations import AppendWork
from hsswap.driver.tensor import Tensor
from hsswap.e4m3 import E4M3Rows
from hsswap.errors import ArgumentError, SharedBlock
from hsswap.exact import LayerCache, blocks_ahead
from hsswap.loads import Blocks
from hsswap.named_ids import NamedIds
from hsswap.tiers import I32, I64, SlotState
from hsswap.writeback import Batch

NO_IDS: I64 = np.empty(0, np.int64)


class NamedCalls(NamedIds):
    """The calls of :class:`hsswap.HighSpeedSwap` on blocks named by id."""

    async def offload_block(
        self,
        *,
        layer: int,
        block: int,
        k_block_dev: object | None = None,
        v_block_dev: object | None = None,
        k_block_host: object | None = None,
        v_block_host: object | None = None,
        valid_tokens: int | None = None,
        k_strides: tuple[int, int, int] | None = None,
        v_strides: tuple[int, int, int] | None = None,
    ) -> None:
        """:meth:`offload_block_on_stream` on the swap's own stream."""
        await self._offload(
            layer, block, (k_block_dev, v_block_dev), (k_block_host, v_block_host), valid_tokens,
            (k_strides, v_strides), self.stream_of(None), predict=True,
        )  # fmt: skip

    async def offload_block_on_stream(
        self,
        *,
        stream: object,
        layer: int,
        block: int,
        k_block_dev: object | None = None,
        v_block_dev: object | None = None,
        k_block_host: object | None = None,
        v_block_host: object | None = None,
        valid_tokens: int | None = None,
        k_strides: tuple[int, int, int] | None = None,
        v_strides: tuple[int, int, int] | None = None,
    ) -> None:
        """Hand one block of a layer over; returns when the copy is enqueued on ``stream``.

        K ``[block_size, kv_heads, head_dim]`` and V ``[block_size, kv_heads, value_dim]``, BF16,
        each as a device pointer (an int with the strides in bytes, contiguous by default, or an
        object with ``__cuda_array_interface__``), as an array in host memory, or both: the device
        one is taken then, without a copy through the host. Of a layer kept as E4M3 they are
        rounded, or both :class:`~hsswap.E4M3Rows` in place of an array. They must stay until work
        enqueued later on the stream is done. ``valid_tokens`` (default: all) from the first on are
        attended, never those behind. A full block goes to disk; one that is not stays in its host
        slot, as long as there is room, until it is offloaded again or the swap is flushed. With a
        predictor its codes are computed when it is full.

        Raises ArgumentError for arguments that cannot be and for an id that a sequence holds,
        StaleBlockId, SharedBlock for an id that several hold and that has content in the layer,
        OutOfSlots: nothing was changed.
        """
        await self._offload(
            layer, block, (k_block_dev, v_block_dev), (k_block_host, v_block_host), valid_tokens,
            (k_strides, v_strides), self.stream_of(stream), predict=True,
        )  # fmt: skip

    async def offload_block_no_predict_on_stream(
        self,
        *,
        stream: object,
        layer: int,
        block: int,
        k_block_host: object,
        v_block_host: object,
        valid_tokens: int | None = None,
    ) -> None:
        """:meth:`offload_block_on_stream` without codes: BF16 K and V in host memory, of a cache
        that is quantised on the device. Attended as usual.
        """
        await self._offload(
            layer, block, (None, None), (k_block_host, v_block_host), valid_tokens, (None, None),
            self.stream_of(stream), predict=False,
        )  # fmt: skip

    async def attend_layer(
        self, *, layer: int, seq_block_ids: ArrayLike, q_dev: object, output_dev: object
    ) -> AttendResult:
        """:meth:`attend_layer_on_stream_with_q_pos` on the swap's own stream, all offloaded tokens
        of the last block.
        """
        return await self._attend_ids(layer, seq_block_ids, q_dev, output_dev, None, None)

    async def attend_layer_on_stream(
        self,
        *,
        stream: object,
        layer: int,
        seq_block_ids: ArrayLike,
        q_dev: object,
        output_dev: object,
    ) -> AttendResult:
        """:meth:`attend_layer_on_stream_with_q_pos` over all offloaded tokens of the last block."""
        return await self._attend_ids(layer, seq_block_ids, q_dev, output_dev, None, stream)

    async def attend_layer_on_stream_with_q_pos(
        self,
        *,
        stream: object,
        layer: int,
        seq_block_ids: ArrayLike,
        q_dev: object,
        output_dev: object,
        last_block_valid_slots: int,
    ) -> AttendResult:
        """Exact attention of one query row over a list of blocks; returns when it is enqueued.

        ``seq_block_ids`` ``[n]``: distinct ids, all but the last one full. ``q_dev``
        ``[q_heads, head_dim]`` and ``output_dev`` ``[q_heads, value_dim]``, BF16: a device pointer
        as an int, or an array. ``last_block_valid_slots``: how many tokens of the last block the
        row sees, ``q_pos % block_size + 1``. Tokens that were not offloaded never get weight.

        Raises ArgumentError, StaleBlockId; BlockIOError when a block cannot be read.
        """
        return await self._attend_ids(
            layer, seq_block_ids, q_dev, output_dev, last_block_valid_slots, stream
        )

    async def _offload(
        self,
        layer: int,
        block: int,
        on_device: tuple[object | None, object | None],
        on_host: tuple[object | None, object | None],
        valid_tokens: int | None,
        strides: tuple[tuple[int, int, int] | None, tuple[int, int, int] | None],
        stream: Stream,
        *,
        predict: bool,
    ) -> None:
        self.check_loop()
        dims, named = self.config.dims, self.named
        pool = self.pool_of(checked_layer(layer, dims.layers))
        size, group = dims.block_size, pool.group
        valid = size if valid_tokens is None else valid_tokens
        valid = checked_length(valid, size, what="valid_tokens", least=1)
        given = [
            there if here is None else here for here, there in zip(on_device, on_host, strict=True)
        ]
        if any(isinstance(part, E4M3Rows) for part in given):
            parts = e4m3_tensors(pool, given[0], given[1], size)
        else:
            parts = {}
            for which, dim in enumerate((group.head_dim, group.value_dim)):
                shape, what = (size, group.kv_heads, dim), "KV"[which]
                if on_device[which] is None and isinstance(given[which], int | np.integer):
                    raise ArgumentError(f"{what} in host memory is {given[which]!r}; give an array")
                tensor = block_tensor(given[which], shape, strides[which], pool, what)
                parts[("keys", "values")[which]] = tensor
        async with named.turn:
            with self._call():
                indices = self._store.ids.check([block])
                index, holders = int(indices[0]), self._store.ids.refcount(block)
                if named.references.get(int(block), 0) < holders:
                    raise ArgumentError(
                        f"block id {block} is a sequence's; offload to one that "
                        "alloc_disk_block_id gave"
                    )
                others = named.valid[layer, index] and holders > 1
                if others or self._store.is_fixed(layer, index):
                    raise SharedBlock(
                        f"block id {block} has other holders, and content in layer {layer}; "
                        "offload to a new id"
                    )
                with self._fills(layer, index):
                    slots = await self._slot_to_fill(Blocks(pool, layer, indices))
                    with self.lock:
                        self.check_open()
                        batch = Batch(
                            Blocks(pool, layer, indices), slots, keep=True, scan=True,
                            lengths=np.array([valid], np.uint16), was_alone=True,
                        )  # fmt: skip
                        rows = {name: part.rows(0, valid) for name, part in parts.items()}
                        self._fill(batch, rows, valid, stream, predict=predict)

    async def _slot_to_fill(self, blocks: Blocks) -> I32:
        """A dirty host slot for a block, its own if it has one that nothing uses."""
        pool, key = blocks.pool, (blocks.layer, int(blocks.indices[0]))
        tier = pool.tier

        def held() -> I32:
            return tier.lookup(blocks.group_layer, blocks.indices)

        def is_ours() -> bool:
            slot = held()
            if self.closed:
                return True
            if self.named.is_read(key[1], blocks.layer):
                return False
            if slot[0] < 0:
                return True
            if tier.leases[slot].any():
                return False
            idle = int(tier.state[slot[0]]) == SlotState.CLEAN
            return idle or key in self.named.parked or self.writes.all_failed(pool, slot)

        await self.prefetcher.until(is_ours)
        with self.lock:
            self.check_open()
            slot = held()
            if slot[0] >= 0:
                if key in self.named.parked:
                    self._unpark(key)
                self.writes.take_back(pool, slot)
                tier.refill(slot)
                return slot
        return await self.prefetcher.reserve(blocks)

    def _fill(
        self, batch: Batch, rows: dict[str, Tensor], valid: int, stream: Stream, *, predict: bool
    ) -> None:  # fmt: skip
        """Launch the copies of one block and say where it is now. Under the lock."""
        named, blocks = self.named, batch.blocks
        pool, layer, index = blocks.pool, blocks.layer, int(blocks.indices[0])
        full = valid == pool.block_size
        device_slots = np.full((1, pool.group.kv_heads), -1, np.int32)
        named.valid[layer, index] = 0
        try:
            if named.resident[layer, index] >= 0:
                behind = self._behind_all_uses()
                unused = [self._take_resident(layer, index)]
                self.retiring.later("ids", NO_IDS, unused, behind)
            resident = pool.take_resident(blocks.group_layer) if full else None
            if resident is not None:
                named.resident[layer, index] = resident
                device_slots = pool.slots.units(np.array([resident], np.int32)).T
            with self._named_use(stream, fills=True):
                work = AppendWork(
                    **rows, first_offset=0, units=pool.units, device_slots=device_slots,
                    blocks=pool.blocks, host_slots=batch.slots,
                )  # fmt: skip
                self.device.append(stream, work)
                if self.predictor is not None:
                    self.predictor.forget(blocks.indices, layer)
                if predict and full:
                    enqueue_codes(self, stream, blocks, batch.slots)
        except BaseException as error:
            self.writes.refuse(batch, error)
            raise
        named.valid[layer, index] = valid
        if not full and pool.spare_host_slots(self.config.tile_blocks) > 0:
            named.parked[layer, index] = batch
            pool.reserved_slots += 1
        else:
            batch = replace(batch, keep=resident is None)
            self.writes.write_after(named.uses[stream.handle], batch)

    async def _attend_ids(
        self,
        layer: int,
        seq_block_ids: ArrayLike,
        q_dev: object,
        output_dev: object,
        last_valid: int | None,
        raw_stream: object | None,
    ) -> AttendResult:
        self.check_open()
        self.check_loop()
        dims, named = self.config.dims, self.named
        pool = self.pool_of(checked_layer(layer, dims.layers))
        stream, group = self.stream_of(raw_stream), pool.group
        indices = self._store.ids.check(seq_block_ids)
        ids = np.asarray(seq_block_ids)
        await self.prefetcher.until(lambda: self.closed or not named.is_filled(layer, indices))
        self._store.ids.check(ids)
        length = named.length_of(layer, ids, indices, last_valid, dims.block_size)
        shape = (1, group.q_heads, group.head_dim)
        queries = block_tensor(q_dev, shape, None, pool, "q_dev")
        shape = (1, group.q_heads, group.value_dim)
        out = block_tensor(output_dev, shape, None, pool, "output_dev", written=True)
        cache = LayerCache(pool, layer, -1, length, named.resident[layer, indices])
        query = Query(cache, indices, queries, out, output_dev, stream)
        with self._call(), self._reads(layer, indices):
            if self.config.look_ahead:
                self._plan_ahead(cache, indices)
            with self._named_use(stream):
                return await attend_exact(self, query)

    def _plan_ahead(self, cache: LayerCache, indices: I64) -> None:
        """Read the rest of the layer and the next one ahead. One plan for each first id."""
        following = (cache.layer + 1) % self.config.dims.layers
        table = self.named.resident[following, indices]
        behind = LayerCache(self.pool_of(following), following, -1, cache.length, table)
        full = self.named.valid[following, indices[: cache.length // cache.pool.block_size]]
        ahead = [blocks_ahead(cache, indices, 1, self.config.tile_blocks)]
        if (full == cache.pool.block_size).all():
            ahead.append(blocks_ahead(behind, indices, 1))
        owner = int(indices[0])
        self.named.plans.add(owner)
        self.prefetcher.plan(("ids", owner), [blocks for blocks in ahead if len(blocks.indices)])
