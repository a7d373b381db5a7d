"""Write-behind: blocks go to disk after the device has filled their host slots."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from hsswap.driver.base import Event
from hsswap.errors import DeviceError, HsswapError, OutOfSlots
from hsswap.forked import awaited
from hsswap.io.base import Priority
from hsswap.io.store import BlockStore
from hsswap.loads import Blocks
from hsswap.loop import Mailbox
from hsswap.metrics import Counters
from hsswap.pools import GroupPool
from hsswap.tiers import I32, I64, SlotState


@dataclass(frozen=True, slots=True)
class Batch:
    """Dirty host slots and the blocks in them. ``keep``: the copy in the host tier is wanted after
    the write; ``scan``: only within the quota of scans (see :mod:`hsswap.tiers`). ``epoch``: how
    many times somebody had begun to wait when the batch was announced. ``lengths``: valid tokens of
    each block, None for full ones. ``was_alone``: see :meth:`BlockStore.write`.
    """

    blocks: Blocks
    slots: I32
    keep: bool
    scan: bool
    epoch: int = 0
    lengths: NDArray[np.uint16] | None = None
    was_alone: bool = False

    def part(self, positions: NDArray[np.int64]) -> Batch:
        """Some blocks of the batch."""
        b = self.blocks
        some = Blocks(b.pool, b.layer, b.indices[positions])
        lengths = None if self.lengths is None else self.lengths[positions]
        return replace(self, blocks=some, slots=self.slots[positions], lengths=lengths)


class WriteBehind:
    """Writes of one swap. ``freed()`` is called on the loop after slots may have become free.

    A block whose write fails stays dirty in its host slot; :meth:`flush` tries it again and raises
    what it gets then. One that the device failed to fill is never written.
    """

    def __init__(
        self,
        store: BlockStore,
        lock: RLock,
        counters: Counters,
        mailbox: Mailbox,
        freed: Callable[[], None],
    ) -> None:
        self._store = store
        self._lock = lock
        self._counters = counters
        self._mailbox = mailbox
        self._freed = freed
        self._failed: list[tuple[Batch, HsswapError]] = []
        self._epoch = 0
        self._moving: Counter[int] = Counter()  # blocks announced or on their way, by epoch
        self._idle: list[tuple[int, asyncio.Future[None]]] = []

    @property
    def pending(self) -> int:
        """Blocks announced or on their way."""
        return self._moving.total()

    def write_after(self, event: Event, batch: Batch) -> None:
        """Write the batch once ``event`` says that the device has filled it. From any thread, under
        the lock.
        """
        batch = self._announce(batch)
        event.call_when_done(lambda: self._mailbox.post(lambda: self._start(event, batch)))

    def refuse(self, batch: Batch, error: BaseException) -> None:
        """The device was never told to fill these slots, or not all of it. Under the lock.

        They stay taken, unwritten, until the sequence that owns the blocks is closed.
        """
        problem = DeviceError(f"the device was not told to fill a block: {error!r}")
        problem.__cause__ = error
        self._failed.append((batch, problem))

    async def flush(self, indices: I64 | None = None) -> None:
        """Wait until everything announced before has been written, failed blocks tried once more.

        Raises the first error of a block, or of one of these, that is still not on disk; it stays
        dirty in memory.
        """
        epoch = self._next_epoch()
        await self._until_idle(epoch)
        with self._lock:
            again: list[Batch] = []
            failed, self._failed = self._failed, []
            for batch, error in failed:
                if batch.epoch > epoch or isinstance(error, DeviceError):
                    self._failed.append((batch, error))
                else:
                    again.append(batch)
            # Under their first epoch: whoever flushes meanwhile waits for them too.
            for batch in again:
                self._moving[batch.epoch] += len(batch.slots)
        for batch in again:
            self._write(batch)
        await self._until_idle(epoch)
        for batch, error in self._failed:
            asked = indices is None or np.isin(batch.blocks.indices, indices).any()
            if batch.epoch <= epoch and asked:
                raise error

    async def settle(self) -> None:
        """Wait until what was announced before has ended, whatever comes in meanwhile."""
        await self._until_idle(self._next_epoch())

    def forget(self, indices: NDArray[np.int64]) -> None:
        """Give up failed blocks whose ids are being freed; nothing of them may be on its way."""
        with self._lock:
            failed, self._failed = self._failed, []
            for batch, error in failed:
                gone = np.isin(batch.blocks.indices, indices)
                batch.blocks.pool.tier.discard(batch.slots[gone])
                if not gone.all():
                    self._failed.append((batch.part(np.flatnonzero(~gone)), error))

    def take_back(self, pool: GroupPool, slots: I32) -> None:
        """These slots are about to be filled anew: what failed of them is not tried again."""
        failed, self._failed = self._failed, []
        for batch, error in failed:
            kept = np.ones(len(batch.slots), np.bool_)
            if batch.blocks.pool is pool:
                kept = ~np.isin(batch.slots, slots)
            if kept.any():
                self._failed.append((batch.part(np.flatnonzero(kept)), error))

    def all_failed(self, pool: GroupPool, slots: I32) -> bool:
        """Whether the writes of all these dirty slots have failed, so that none is on its way."""
        failed = [b.slots for b, _ in self._failed if b.blocks.pool is pool]
        return bool(failed) and bool(np.isin(slots, np.concatenate(failed)).all())

    def starved(self, pools: Iterable[GroupPool]) -> HsswapError | None:
        """Why no host slot will ever become free, or None while something in flight may free one.

        Asked under the lock while no read is in flight.
        """
        dirty = 0
        for pool in pools:
            if (pool.tier.leases > pool.tier.pinned).any():
                return None
            dirty += int((pool.tier.state == SlotState.DIRTY).sum()) - pool.reserved_slots
        failed = sum(len(batch.slots) for batch, _ in self._failed)
        if self.pending or dirty > failed:
            return None
        if self._failed:
            return self._failed[0][1]
        return OutOfSlots("no host slot can become free for this call; raise host_slots")

    def _start(self, event: Event, batch: Batch) -> None:
        try:
            event.is_done()
        except DeviceError as error:
            self._finish(batch, error)
            return
        self._write(batch)

    def _write(self, batch: Batch) -> None:
        blocks = batch.blocks
        with self._lock:
            blocks.pool.tier.start_write(batch.slots)
        try:
            self._store.write(
                blocks.layer,
                blocks.indices,
                blocks.pool.addresses(batch.slots),
                priority=Priority.WRITE,
                owner=blocks.pool.host_memory,
                lengths=batch.lengths,
                was_alone=batch.was_alone,
                on_done=lambda positions, error: self._finish(batch.part(positions), error),
            )
        except HsswapError as error:
            self._finish(batch, error)

    def _finish(self, batch: Batch, error: HsswapError | None) -> None:
        with self._lock:
            batch.blocks.pool.tier.finish_write(
                batch.slots, ok=error is None, scan=batch.scan, keep=batch.keep
            )
            self._moving[batch.epoch] -= len(batch.slots)
            if not self._moving[batch.epoch]:
                del self._moving[batch.epoch]
            if error is not None:
                self._failed.append((batch, error))
                self._counters.write_errors += len(batch.slots)
            idle = [entry for entry in self._idle if self._is_idle(entry[0])]
            self._idle = [entry for entry in self._idle if entry not in idle]
        for _, future in idle:
            if not future.done():
                future.set_result(None)
        self._freed()

    def _announce(self, batch: Batch) -> Batch:
        self._moving[self._epoch] += len(batch.slots)
        return replace(batch, epoch=self._epoch)

    def _next_epoch(self) -> int:
        """Begin to wait: the epoch of what was announced last."""
        with self._lock:
            epoch, self._epoch = self._epoch, self._epoch + 1
        return epoch

    async def _until_idle(self, epoch: int) -> None:
        """Wait until nothing moves that was announced in this epoch or before.

        Looked at again after every wait, and no turn of the loop follows the last look: another
        flush may have begun to write its failed blocks anew.
        """
        while True:
            with self._lock:
                if self._is_idle(epoch):
                    return
                idle = awaited(asyncio.get_running_loop().create_future())
                self._idle.append((epoch, idle))
            await idle

    def _is_idle(self, epoch: int) -> bool:
        return not any(other <= epoch for other in self._moving)
