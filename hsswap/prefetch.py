"""The only place that waits for blocks: loads that an attend needs now, and reads ahead.

Everything runs on the event loop's thread; the tiers are touched under the swap's lock. Rules:

* What is needed now is admitted in order of arrival, all of a tile's slots or none, so that no two
  attends can hold each other's slots for ever. A tile always fits, since the host tier holds two.
* Blocks on their way join: a second asker waits for the first one's read.
* Reading ahead takes only free slots and goes to the backend behind what is needed. A plan is
  replaced at every attend, so it never grows beyond the rest of a layer and a few of those behind.
* A cancelled load gives its leases back at once; the slots stay taken until their reads have ended.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from threading import RLock

import numpy as np
from numpy.typing import NDArray

from hsswap.errors import ClosedError, HsswapError, StaleBlockId
from hsswap.forked import awaited
from hsswap.io.base import Priority
from hsswap.io.store import BlockStore
from hsswap.loads import Blocks, Leased, Load, Loaded
from hsswap.metrics import Counters
from hsswap.plans import READ_AHEAD_BYTES, Plans
from hsswap.pools import GroupPool
from hsswap.tiers import I32, I64, READING, SlotState


@dataclass(eq=False, slots=True)
class _Waiter:
    """A caller in the queue for slots for ``blocks``; ``admit`` tries once, under the lock."""

    blocks: Blocks
    admit: Callable[[], bool]
    turn: asyncio.Future[None]


class Prefetcher:
    """Loads and read-ahead of one swap. Made on the loop it runs on.

    ``starved()`` is asked, under the lock, when someone waits for slots while no read runs: the
    error that says why none will ever become free, or None if one may.
    """

    def __init__(
        self,
        store: BlockStore,
        lock: RLock,
        counters: Counters,
        starved: Callable[[], HsswapError | None],
    ) -> None:
        self._store = store
        self._starved = starved
        self._lock = lock
        self._counters = counters
        self._waiters: deque[_Waiter] = deque()
        self._plans = Plans()
        self._load_of: dict[int, NDArray[np.object_]] = {}
        self._in_flight: set[Load] = set()
        self._changed: list[asyncio.Future[None]] = []
        self._busy_since = 0.0
        self._loop = asyncio.get_running_loop()
        self._pump_scheduled = False
        self._goes_on = False  # this turn has read ahead, the next one will
        self._closed = False

    def __repr__(self) -> str:
        return (
            f"<Prefetcher waiting={len(self._waiters)} reading={len(self._in_flight)} "
            f"planned={self._plans.count}>"
        )

    @property
    def crowded(self) -> bool:
        """Whether someone waits for slots: who comes now must queue, or could starve them."""
        return bool(self._waiters)

    @property
    def waiting_count(self) -> int:
        """Callers in the queue for slots."""
        return len(self._waiters)

    @property
    def reading_count(self) -> int:
        """Submissions whose blocks are not all there."""
        return len(self._in_flight)

    async def load(self, blocks: Blocks) -> Loaded:
        """Lease host slots that hold the blocks, reading what is on disk only.

        At most a tile of blocks. Release with ``pool.tier.release`` under the lock, then
        :meth:`pump`. Raises the store's error for a block that could not be read, OutOfSlots when
        no slot can ever become free, ClosedError when the swap closes meanwhile.
        """
        if not len(blocks.indices):
            return Loaded(np.empty(0, np.int32), 0)
        admitted: list[Leased] = []

        def admit() -> bool:
            got = blocks.pool.tier.admit(blocks.group_layer, blocks.indices)
            if got is None:
                return False
            slots, absent = got
            if absent.any():
                missing = Blocks(blocks.pool, blocks.layer, blocks.indices[absent])
                self._submit(missing, slots[absent], Priority.NEEDED)
            admitted.append(Leased(blocks.pool, slots, self._loads_of(blocks.pool, slots)))
            return True

        start = time.perf_counter()
        await self._take_turn(blocks, admit, undo=lambda: self._release(admitted[0]))
        return await self.arrived(admitted[0], start)

    def join(self, blocks: Blocks, most: int) -> Leased | None:
        """Lease host slots of blocks that are all there or on their way, at least one and ``most``
        at most; None, and no lease, for others. Under the lock. Then await :meth:`arrived`.

        Nobody waits for room while holding others' that way, however many blocks there are.
        """
        tier = blocks.pool.tier
        slots = tier.lookup(blocks.group_layer, blocks.indices)
        if self._waiters or (slots < 0).any():
            return None
        loads = self._loads_of(blocks.pool, slots)
        if not 0 < sum(map(len, loads.values())) <= most:
            return None
        tier.lease(slots)
        return Leased(blocks.pool, slots, loads)

    async def arrived(self, leased: Leased, start: float | None = None) -> Loaded:
        """Wait for the reads that leased slots wait for, since ``start``. Raises the store's error
        for a block that could not be read; the leases are given back then.
        """
        start, loads = start or time.perf_counter(), leased.loads
        try:
            for load in loads:
                await load.finished.wait()
        except BaseException:
            self._release(leased)
            raise
        self._counters.read_wait_s += time.perf_counter() - start if loads else 0.0
        errors = [load.failed[s] for load, mine in loads.items() for s in mine if s in load.failed]
        if errors:
            self._release(leased)
            raise errors[0]
        return Loaded(leased.slots, sum(map(len, loads.values())))

    async def reserve(self, blocks: Blocks) -> I32:
        """Dirty host slots for blocks about to be written there. Raises like :meth:`load`."""
        if not len(blocks.indices):
            return np.empty(0, np.int32)
        taken: list[I32] = []

        def admit() -> bool:
            slots = blocks.pool.tier.take(
                blocks.group_layer, blocks.indices, SlotState.DIRTY, needed=True
            )
            if slots is not None:
                taken.append(slots)
            return slots is not None

        await self._take_turn(blocks, admit, undo=lambda: self.abandon(blocks.pool, taken[0]))
        return taken[0]

    def begin(self, blocks: Blocks, spare: I32) -> None:
        """Begin to read blocks that nobody waits for. They push out what needed ones may, but for
        the slots ``spare``; what finds no room, or cannot be read, stays on disk. Under the lock.
        """
        tier = blocks.pool.tier
        absent = blocks.indices[tier.lookup(blocks.group_layer, blocks.indices) < 0]
        step = max(1, READ_AHEAD_BYTES // blocks.pool.block_bytes)
        for start in range(0, 0 if self._closed or self._waiters else len(absent), step):
            part = Blocks(blocks.pool, blocks.layer, absent[start : start + step])
            slots = tier.take(part.group_layer, part.indices, READING, needed=True, spare=spare)
            if slots is None:
                blocks.pool.holders.ask_back()
                break
            self._submit(part, slots, Priority.PREFETCH)

    def abandon(self, pool: GroupPool, slots: I32) -> None:
        """Give back reserved slots that were not filled."""
        with self._lock:
            pool.tier.discard(slots)
        self.pump()

    def plan(self, owner: Hashable, ahead: list[Blocks]) -> None:
        """Read these blocks ahead, in order, in place of what ``owner`` planned before."""
        if self._closed:
            return
        self._plans.replace(owner, ahead)
        self.pump()

    def has_plan(self, owner: Hashable) -> bool:
        """Whether something is to be read ahead for ``owner``. Under the lock, from any thread."""
        return owner in self._plans

    def forget(self, indices: I64) -> None:
        """Read nothing of these ids any more: they are freed, and may be another's next. Who waits
        for slots for them is refused. Under the lock.
        """
        for waiter in self._waiters:  # a look-ahead: its sequence does not wait for it
            if not waiter.turn.done() and np.isin(waiter.blocks.indices, indices).any():
                waiter.turn.set_exception(StaleBlockId("a block was freed before it was read"))
        self._plans.forget(indices)

    def pump(self) -> None:
        """Admit who waits, then read ahead, as far as slots are free. Call when some became so."""
        self._pump_scheduled = False
        with self._lock:
            while self._waiters:
                waiter = self._waiters[0]
                if not waiter.turn.done():
                    if waiter.admit():
                        waiter.turn.set_result(None)
                    elif not self._in_flight and (reason := self._starved()) is not None:
                        waiter.turn.set_exception(reason)  # and the next may fit, or is told too
                    else:
                        waiter.blocks.pool.holders.ask_back()
                        break
                self._waiters.popleft()
            self._read_ahead()
        self._tell_changed()

    def pump_soon(self) -> None:
        """:meth:`pump` once, after what the loop has at hand: many slots come free together."""
        if not self._pump_scheduled:
            self._pump_scheduled = True
            self._loop.call_soon(self.pump)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition()``, asked under the lock whenever slots may have changed."""
        while True:
            with self._lock:
                if condition():
                    return
                changed = awaited(asyncio.get_running_loop().create_future())
                self._changed.append(changed)
            await changed

    async def settle(self) -> None:
        """Wait until every read that is on its way now has ended."""
        for load in list(self._in_flight):
            await load.finished.wait()

    def close(self) -> None:
        """Refuse what waits, drop the plans. Reads in flight go on; :meth:`settle` waits."""
        self._closed = True
        self._plans.clear()
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.turn.done():
                waiter.turn.set_exception(ClosedError("the swap was closed during the call"))
        self._tell_changed()

    def _tell_changed(self) -> None:
        changed, self._changed = self._changed, []
        for future in changed:
            if not future.done():
                future.set_result(None)

    async def _take_turn(
        self, blocks: Blocks, admit: Callable[[], bool], undo: Callable[[], None]
    ) -> None:
        """Wait in line until ``admit`` succeeds; ``undo`` it if the caller was cancelled then."""
        if self._closed:
            raise ClosedError("the swap is closed; open a new one")
        with self._lock:
            if not self._waiters and admit():
                return
            waiter = _Waiter(blocks, admit, awaited(asyncio.get_running_loop().create_future()))
            self._waiters.append(waiter)
        self.pump()
        try:
            await waiter.turn
        except asyncio.CancelledError:
            # Cancelled after the turn came but before this task ran: the slots are ours to return.
            if waiter.turn.done() and not waiter.turn.cancelled() and not waiter.turn.exception():
                undo()
            with suppress(ValueError):
                self._waiters.remove(waiter)
            self.pump()
            raise

    def _read_ahead(self) -> None:
        """Begin to read the next part of what is planned; the others in turns that follow."""
        if self._goes_on or self._waiters:
            return
        part = self._plans.take()
        if part is None:
            return
        if len(part.slots):
            self._submit(part.blocks, part.slots, Priority.PREFETCH)
        self._goes_on = True
        self._loop.call_soon(self._read_on)

    def _read_on(self) -> None:
        self._goes_on = False
        with self._lock:
            self._read_ahead()

    def _submit(self, blocks: Blocks, slots: I32, priority: Priority) -> None:
        load = Load(blocks.pool, slots, len(slots))
        self._table(blocks.pool)[slots] = load
        if not self._in_flight:
            self._busy_since = time.perf_counter()
        self._in_flight.add(load)
        self._store.read(
            blocks.layer,
            blocks.indices,
            blocks.pool.addresses(slots),
            priority=priority,
            owner=blocks.pool.host_memory,
            on_done=lambda positions, error: self._on_read(load, positions, error),
        )

    def _on_read(self, load: Load, positions: NDArray[np.int64], error: HsswapError | None) -> None:
        slots = load.slots[positions]
        with self._lock:
            load.pool.tier.finish_read(slots, ok=error is None)
            self._table(load.pool)[slots] = None
            if error is not None:
                load.failed.update(dict.fromkeys(slots.tolist(), error))
        load.remaining -= len(slots)
        if load.remaining == 0:
            self._in_flight.discard(load)
            if not self._in_flight:
                self._counters.read_busy_s += time.perf_counter() - self._busy_since
            load.finished.set()
            self.pump_soon()

    def _loads_of(self, pool: GroupPool, slots: I32) -> dict[Load, list[int]]:
        """The reads that some of the slots wait for, and which slots. A load's other slots do not
        count: one that failed is free, and may hold another of the blocks by now.
        """
        loads: dict[Load, list[int]] = {}
        reading = slots[pool.tier.state[slots] == READING]
        for slot, load in zip(reading.tolist(), self._table(pool)[reading].tolist(), strict=True):
            loads.setdefault(load, []).append(slot)
        return loads

    def _table(self, pool: GroupPool) -> NDArray[np.object_]:
        """The load that each slot of a pool waits for."""
        table = self._load_of.get(id(pool))
        if table is None:
            table = self._load_of[id(pool)] = np.full(pool.tier.slot_count, None)
        return table

    def _release(self, leased: Leased) -> None:
        loads = leased.loads.items()
        lost = [slot for load, mine in loads for slot in mine if slot in load.failed]
        kept = leased.slots[~np.isin(leased.slots, lost)] if lost else leased.slots
        with self._lock:
            leased.pool.tier.release(kept, scan=True)
        self.pump()
