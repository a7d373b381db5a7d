"""Tables of where blocks lie: right after any change, never changed or given up under a reader."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hsswap.driver.base import Event
from hsswap.driver.host import HostDevice
from hsswap.driver.tensor import Tensor
from hsswap.resident_table import Holders, ResidentTable, TableMemory
from hsswap.tiers import CLEAN, HostTier

HEADS = 3


@settings(max_examples=60)
@given(st.lists(st.integers(1, 90) | st.integers(-8, -1), max_size=40))
def test_room_is_never_given_twice(steps: list[int]) -> None:
    with HostDevice() as device:
        memory = TableMemory(device, 100, HEADS)
        taken: list[tuple[int, int]] = []
        for step in steps:
            if step > 0:
                first = memory.take(step)
                if first is not None:
                    taken.append((first, step))
            elif taken:
                memory.give_back(*taken.pop(step % len(taken)))
            used = sorted(n for first, count in taken for n in range(first, first + count))
            assert len(set(used)) == len(used)
            assert not used or used[-1] < 200
        for place in taken:
            memory.give_back(*place)
        assert memory.take(200) == 0
        memory.memory.close()


CHANGES = st.lists(
    st.tuples(
        st.sampled_from(("grow", "fill", "lose", "cut", "move", "hold", "ask", "run")),
        st.integers(0, 200),
    ),
    max_size=40,
)
IDS, SLOTS = 900, 700


class Reader(Event):
    """A launch that reads a table until it is told to end."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.wanted, self.done = table, table.array()[0].copy(), False
        self.slots = (-2 - self.wanted[0, self.wanted[0] < -1]) // HEADS
        self.behind: list[Callable[[], None]] = []

    def is_done(self) -> bool:
        return self.done

    def synchronize(self) -> None:
        raise NotImplementedError

    async def wait(self) -> None:
        raise NotImplementedError

    def call_when_done(self, callback: Callable[[], None]) -> None:
        self.behind.append(callback)

    def end(self) -> None:
        """It has run: what it read was what was there when it was enqueued."""
        assert (self.table.array()[0] == self.wanted).all()
        self.done = True
        for callback in self.behind:
            callback()


@settings(max_examples=150)
@given(CHANGES)
def test_a_table_says_what_the_slots_say(changes: list[tuple[str, int]]) -> None:
    """Device slots, and host slots that are held: never given up under a reader, all given back."""
    with HostDevice() as device:
        memory, holders = TableMemory(device, 1300, HEADS), Holders()
        tier = HostTier(1, IDS, SLOTS, window=100)
        indices = np.arange(IDS)[::-1].astype(np.int64)

        def release(event: Event | None, slots: np.ndarray) -> None:
            if event is None or event.is_done():
                tier.release(slots, scan=True)
            else:
                event.call_when_done(lambda: tier.release(slots, scan=True))

        table = ResidentTable(memory, holders, tier, 0, release)
        places: list[int] = []  # device slots, -1 for a block that is in the host tier
        readers: list[Reader] = []
        following = 0
        for what, size in changes:
            if what in ("grow", "fill") and len(places) + size < 500:
                table.changed(max(0, len(places) - 1))
                if what == "fill":  # blocks that go to the host tier as they become full
                    stop = len(places) + size
                    new = indices[len(places) : stop]
                    new = new[tier.lookup(0, new) < 0]
                    if tier.take(0, new, CLEAN, needed=True) is None:
                        continue
                    places += [-1] * size
                else:
                    places += range(following, following + size)
                    following += size
            elif what == "ask":
                holders.ask_back()
            elif what == "run" and readers:
                readers.pop(0).end()
            elif what == "hold" and places and not table.is_whole:
                table.hold(indices)
            elif what in ("lose", "cut", "move") and places:
                at = size % len(places)
                table.changed(at)
                if what == "cut":
                    del places[at:]
                    table.cut(at)
                else:
                    places[at] = -1 if what == "lose" else following
                    following += 1
            array = np.array([*places, *[-1] * 9], np.int32)
            table.settle(array, indices, len(places))
            tier.check()
            for reader in readers:  # which have not run yet
                assert (tier.leases[reader.slots] > 0).all()
            assert table.missing == places.count(-1)
            if table.is_whole and places:
                units = table.units(0, len(places))
                in_host = tier.lookup(0, indices[: len(places)])
                held = array[: len(places)] < 0
                assert (tier.leases[in_host[held]] > 0).all()
                if units is not None:
                    wanted = units_of(array[: len(places)], in_host)
                    assert (units.array()[0] == wanted).all()
                    table.reader = Reader(units)
                    readers.append(table.reader)
        table.let_go()
        for reader in readers:
            reader.end()
        assert not holders.tables
        assert not tier.leases.any()
        table.leave()
        table.give_back(table.left)
        assert memory.take(2600) == 0
        memory.memory.close()


def units_of(places: np.ndarray, in_host: np.ndarray) -> np.ndarray:
    """What attention must read."""
    heads = np.arange(HEADS)[:, None]
    return np.where(places < 0, -2 - (in_host * HEADS + heads), places * HEADS + heads)
