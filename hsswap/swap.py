"""HighSpeedSwap: a KV cache larger than device memory, for one event loop.

It wires the rooms together: the store on disk, the pools of slots, the prefetcher, write-behind and
the device. Sequences do the rest.
"""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from numpy.typing import ArrayLike

from hsswap.batching import BatchCalls
from hsswap.config import SwapConfig
from hsswap.diagnostics import DiagnosticSummary, summary_of
from hsswap.driver import open_device
from hsswap.driver.base import Device
from hsswap.driver.preparing import PrepareWork
from hsswap.errors import ArgumentError, ConfigError, OutOfSlots, shown
from hsswap.io.base import BlockIO
from hsswap.io.store import BlockStore
from hsswap.io.waiting import goes_on, is_own, to_the_end
from hsswap.loop import in_thread, insist
from hsswap.metrics import SwapStatistics
from hsswap.sequence import Sequence
from hsswap.topk import TopK
from hsswap.validation import require_kind


def launched_by(config: SwapConfig) -> PrepareWork:
    """What a swap of these settings launches."""
    return PrepareWork(
        config.dims.groups,
        config.dims.block_size,
        config.capacity_blocks * config.dims.block_size,
        config.max_sequences,
        config.predictor,
    )


async def _close_device(device: Device) -> None:
    """The end of a device that a swap holds."""
    device.is_held = False
    await in_thread(device.close)


class HighSpeedSwap(BatchCalls):
    """KV blocks of many sequences in device slots, host slots and on disk.

    Open it with ``async with HighSpeedSwap.open(config) as swap``. It belongs to the event loop it
    was opened on; plain functions (``try_attend``, ``statistics``) may be called from any thread.

    An engine calls :meth:`sequence`, :meth:`open_prefix`, :meth:`attend_batch`, :meth:`flush`,
    :meth:`statistics` and :meth:`close`, or, for blocks by id, :meth:`alloc_disk_block_id`,
    ``offload_block...``, ``attend_layer...``, :meth:`inc_disk_ref` and :meth:`dec_disk_ref`. What
    else is here is for sequences.
    """

    def __del__(self) -> None:
        if hasattr(self, "mailbox") and not self.closed:
            warnings.warn(
                "a swap was not closed; use 'async with HighSpeedSwap.open(...)'",
                ResourceWarning,
                stacklevel=2,
            )

    def __repr__(self) -> str:
        state = "closed" if self.closed else f"sequences={len(self._sequences)}"
        return f"<HighSpeedSwap {self.device.name} {self._store.path} {state}>"

    @classmethod
    @asynccontextmanager
    async def open(
        cls, config: SwapConfig, *, io: BlockIO | None = None, device: Device | None = None
    ) -> AsyncIterator[Self]:
        """:meth:`create` a swap and close it at the end of the ``async with`` block."""
        swap = await cls.create(config, io=io, device=device)
        try:
            yield swap
        finally:
            await swap.close()

    @classmethod
    async def create(
        cls, config: SwapConfig, *, io: BlockIO | None = None, device: Device | None = None
    ) -> Self:
        """A swap on the running loop; the caller closes it.

        ``io`` and ``device`` replace what the config names (a scripted memory backend, for tests);
        the swap closes them. Raises ConfigError, DeviceError, StoreLocked, or BlockIOError when
        the directory cannot be used.
        """
        require_kind(config, SwapConfig, "config", "a SwapConfig")
        require_kind(io, (BlockIO, type(None)), "io", "a BlockIO or None")
        require_kind(device, (Device, type(None)), "device", "a Device or None")
        async with AsyncExitStack() as undo:
            used = device
            if used is None:
                used = await in_thread(lambda: open_device(config.device), Device.close)
            used.check_unheld()
            used.is_held = True
            undo.push_async_callback(_close_device, used)
            if used.name != config.device:
                config = replace(config, device=used.name)  # a tile there may be larger
            await in_thread(lambda: used.prepare(launched_by(config)))
            store = await BlockStore.open(
                config.dims,
                None if config.directory is None else Path(config.directory),
                config.capacity_blocks,
                io if io is not None else config.io,
                io_threads=config.io_threads,
                persist=config.persist,
                fingerprint=config.fingerprint,
                disk_bytes=config.disk_bytes,
            )
            undo.push_async_callback(store.close)
            swap = await in_thread(lambda: cls(config, used, store), cls._free)
            swap._start()
            undo.pop_all()
            return swap

    @classmethod
    async def new(cls, *, cfg: SwapConfig, ctx: Device | None = None) -> Self:
        """:meth:`create` on a device that ``hsswap.driver.open_device`` opened, and that the swap
        closes in the end.
        """
        return await cls.create(cfg, device=ctx)

    @classmethod
    async def new_on_stream(
        cls, *, stream: object, cfg: SwapConfig, ctx: Device | None = None
    ) -> Self:
        """:meth:`new` for a caller with a stream; the swap's own work runs behind what is on it.

        Raises ArgumentError too, for what is no stream of the device.
        """
        swap = await cls.new(cfg=cfg, ctx=ctx)
        try:
            swap.stream_of(None).wait_for(swap.stream_of(stream).record())
        except BaseException:
            await swap.close()
            raise
        return swap

    def diagnostic_summary(self) -> DiagnosticSummary:
        """Occupancy, hits, bytes, waits, errors and the path in use. From any thread."""
        return summary_of(self)

    def sequence(self, *, top_k: TopK | None = None) -> Sequence:
        """A new, empty sequence. ``top_k`` None: exact mode.

        Raises OutOfSlots when ``max_sequences`` are open or device slots are too few for top-k
        (with the number needed), ConfigError for top-k without a predictor, ClosedError.
        """
        with self.lock:
            self.check_open()
            if len(self._sequences) >= self.config.max_sequences:
                raise OutOfSlots(
                    f"max_sequences is {self.config.max_sequences} and as many are open; close one "
                    f"or raise it ({self.config.dims.layers} device slots for each)"
                )
            if top_k is not None and not isinstance(top_k, TopK):
                raise ArgumentError(f"top_k is {shown(top_k)}; give hsswap.TopK(k=...)")
            if top_k is not None and self.config.predictor is None:
                raise ConfigError(
                    "top-k needs a predictor; give SwapConfig(predictor=hsswap.PredictorConfig())"
                )
            sequence = Sequence(self, self._next_number, top_k)
            self._sequences[sequence.number] = sequence
            self._next_number += 1
            return sequence

    async def open_prefix(self, tokens: ArrayLike, *, top_k: TopK | None = None) -> Sequence:
        """A new sequence that holds the longest stored prefix of these tokens already.

        ``tokens`` ``[n]``, whole numbers. Its :attr:`~hsswap.Sequence.length` says how many of them
        it holds, whole blocks, perhaps none; append the rest. To get the output of the last token
        too, give the tokens before it. Only what :meth:`Sequence.commit` stored is found, in this
        process or, with ``persist``, an earlier one.

        Raises like :meth:`sequence`, ArgumentError for tokens that are no whole numbers, and in
        top-k mode, where stored blocks are read for their codes, BlockIOError.
        """
        self.check_open()
        self.check_loop()
        ids = self._store.find_prefix(tokens)
        try:
            sequence = self.sequence(top_k=top_k)
        except BaseException:
            self._store.ids.drop_reference(ids)
            raise
        try:
            await sequence.adopt(ids)
        except BaseException:
            self.retiring.close_soon(sequence)
            raise
        return sequence

    async def flush(self) -> None:
        """Wait until every full block appended so far, and every block offloaded, is on disk.

        Raises the error of a block that could not be written; it stays in memory and is tried again
        at the next flush.
        """
        self.check_open()
        self.check_loop()
        self._write_parked()
        await self.writes.flush()

    def statistics(self) -> SwapStatistics:
        """What happened since the swap was opened, and what is in use now. From any thread."""
        with self.lock:
            counters, store = self.counters, self._store.statistics()
            return SwapStatistics(
                device_hits=counters.device_hits,
                host_hits=counters.host_hits,
                misses=counters.misses,
                attends=counters.attends,
                appended_tokens=counters.appended_tokens,
                blocks_read=store.blocks_read,
                blocks_written=store.blocks_written,
                bytes_read=store.bytes_read,
                bytes_written=store.bytes_written,
                read_wait_s=counters.read_wait_s,
                read_busy_s=counters.read_busy_s,
                host_evictions=sum(pool.tier.evictions for pool in self._pools),
                write_errors=counters.write_errors,
                device_slots_used=sum(pool.slots.used_count for pool in self._pools),
                host_slots_used=sum(
                    pool.tier.slot_count - pool.tier.free_count for pool in self._pools
                ),
                free_blocks=self._store.ids.free_count,
                path=self._store.path,
            )

    async def close(self) -> None:
        """Close sequences, finish or refuse what is in flight, free everything, remove the store.

        Calls still waiting get ClosedError. Twice is fine, and the second waits for the first. Goes
        on to the end when cancelled meanwhile. Does nothing in a fork of its process.

        A swap whose own loop is closed, so that nothing else can be called, is closed from another
        one: ``asyncio.run(swap.close())``. Calls that were waiting never end; of a persistent store
        what :meth:`flush` or :meth:`Sequence.commit` returned for is there afterwards.
        """
        if self.is_inherited:
            return
        is_orphan = self._loop.is_closed()
        if not is_orphan:
            self.check_loop()
        with self.lock:
            self.closed = True  # from here on nothing is enqueued
        if self._ended is not None and goes_on(self._ended):
            await asyncio.shield(self._ended)
            return
        ended = self._ended = asyncio.get_running_loop().create_future()
        if is_orphan:
            await self._close_orphan(ended)
            return
        self.prefetcher.close()
        try:
            # Launches end, then I/O (the store ends also what never answers), then what they report
            # is taken in, and last the memory they used is freed.
            await to_the_end(
                lambda: insist(self._quiet),
                self._store.close,
                lambda: insist(self.prefetcher.settle),
                lambda: insist(self.writes.settle),
                lambda: insist(self.retiring.ended),
                lambda: insist(self._calibrated),
                # Calls that waited for any of this end now, with launches of their own behind them.
                lambda: insist(lambda: self.prefetcher.until(self._no_call)),
                lambda: insist(self._quiet),
                lambda: in_thread(self._free),
                lambda: _close_device(self.device),
            )
        finally:
            self._ends(ended)

    async def _close_orphan(self, ended: asyncio.Future[None]) -> None:
        """:meth:`close` without the loop that tasks and futures of the swap belong to: launches and
        I/O end, whoever asked for them, and then all is freed.
        """
        try:
            await to_the_end(
                lambda: insist(self._launched),
                self._store.close,
                lambda: in_thread(self._free),
                lambda: _close_device(self.device),
            )
        finally:
            self._ends(ended)

    def _ends(self, ended: asyncio.Future[None]) -> None:
        if is_own(ended, self._ended):
            self.mailbox.close()
            self._sequences.clear()
            ended.set_result(None)
