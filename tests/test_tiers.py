"""Slot states against a plain model, and the policies by example."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsswap.driver.operations import host_unit
from hsswap.errors import OutOfSlots
from hsswap.tiers import DeviceSlots, HostTier, SlotState, Tile, tiles_of

LAYERS, IDS, SLOTS = 3, 12, 10


class HostTierMachine(RuleBasedStateMachine):
    """Random takes, reads, writes, leases and drops; the tier must agree with dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.tier = HostTier(LAYERS, IDS, SLOTS, window=4)
        self.leases: list[np.ndarray] = []
        self.reading: list[int] = []
        self.writing: list[int] = []

    def _absent(self, layer: int, wanted: list[int]) -> np.ndarray:
        indices = np.array(sorted(set(wanted)), np.int64)
        return indices[self.tier.lookup(layer, indices) < 0]

    @rule(
        layer=st.integers(0, LAYERS - 1),
        wanted=st.lists(st.integers(0, IDS - 1), min_size=1, max_size=6),
    )
    def admit(self, layer: int, wanted: list[int]) -> None:
        indices = np.array(sorted(set(wanted)), np.int64)
        before = self.tier.lookup(layer, indices)
        got = self.tier.admit(layer, indices)
        if got is None:
            usable = (self.tier.state == SlotState.CLEAN) & (self.tier.leases == 0)
            usable[before[before >= 0]] = False
            if (self.tier.leases > 0).any():
                usable &= self.tier._ahead  # cached ones wait for the leases instead
            assert (before < 0).sum() > self.tier.free_count + usable.sum()
            return
        slots, absent = got
        assert (absent == (before < 0)).all()
        assert (self.tier.layer_of[slots] == layer).all()
        assert (self.tier.index_of[slots] == indices).all()
        self.reading += slots[absent].tolist()
        self.leases.append(slots)

    @rule(
        layer=st.integers(0, LAYERS - 1),
        wanted=st.lists(st.integers(0, IDS - 1), min_size=1, max_size=6),
        needed=st.booleans(),
    )
    def append(self, layer: int, wanted: list[int], needed: bool) -> None:
        indices = self._absent(layer, wanted)
        free = self.tier.free_count
        slots = self.tier.take(layer, indices, SlotState.DIRTY, needed=needed)
        if slots is None:
            assert len(indices) > free
            return
        if not needed:
            assert self.tier.free_count == free - len(indices)
        self.tier.start_write(slots)
        self.writing += slots.tolist()

    @precondition(lambda self: self.reading)
    @rule(data=st.data(), ok=st.booleans())
    def finish_read(self, data: st.DataObject, ok: bool) -> None:
        slot = data.draw(st.sampled_from(self.reading))
        self.reading.remove(slot)
        self.tier.finish_read(np.array([slot], np.int32), ok=ok)
        if not ok:  # who leased it has been told and gives it up
            self.leases = [slots[slots != slot] for slots in self.leases]

    @precondition(lambda self: self.writing)
    @rule(data=st.data(), keep=st.booleans(), scan=st.booleans())
    def finish_write(self, data: st.DataObject, keep: bool, scan: bool) -> None:
        slot = data.draw(st.sampled_from(self.writing))
        self.writing.remove(slot)
        self.tier.finish_write(np.array([slot], np.int32), ok=True, scan=scan, keep=keep)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), scan=st.booleans())
    def release(self, data: st.DataObject, scan: bool) -> None:
        slots = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        self.tier.release(slots, scan=scan)

    @invariant()
    def consistent(self) -> None:
        self.tier.check()
        held = np.zeros(SLOTS, np.int64)
        for slots in self.leases:
            held[slots] += 1
        assert (self.tier.leases == held).all()
        for slot in self.reading:
            assert self.tier.state[slot] == SlotState.READING
        for slot in self.writing:
            assert self.tier.state[slot] == SlotState.WRITING


HostTierMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHostTier = HostTierMachine.TestCase


def loaded(tier: HostTier, layer: int, indices: list[int], *, needed: bool = True) -> np.ndarray:
    slots = tier.take(layer, np.array(indices), SlotState.READING, needed=needed)
    assert slots is not None
    tier.finish_read(slots, ok=True)
    return slots


def test_a_scan_keeps_only_its_quota() -> None:
    tier = HostTier(1, 64, 16, window=10)
    for start in range(0, 32, 4):
        got = tier.admit(0, np.arange(start, start + 4))
        assert got is not None
        tier.finish_read(got[0][got[1]], ok=True)
        tier.release(got[0], scan=True)
    # 16 slots less a window of 10: the first 6 blocks of the scan stay, nothing else does.
    assert np.flatnonzero(tier.slot_of[0] >= 0).tolist() == [0, 1, 2, 3, 4, 5]


def test_what_is_needed_pushes_out_what_was_read_ahead_before_what_is_cached() -> None:
    tier = HostTier(1, 64, 8, window=4)
    cached = tier.admit(0, np.arange(4))
    assert cached is not None
    tier.finish_read(cached[0], ok=True)
    tier.release(cached[0], scan=True)
    for index in (10, 11, 12):
        loaded(tier, 0, [index], needed=False)
    assert tier.free_count == 1
    assert tier.take(0, np.array([13, 14]), SlotState.READING, needed=False) is None
    assert tier.take(0, np.array([20, 21]), SlotState.READING, needed=True) is not None
    gone = tier.lookup(0, np.array([10, 11, 12])) < 0
    assert gone.tolist() == [False, False, True]  # the latest of those read ahead
    assert (tier.lookup(0, np.arange(4)) >= 0).all()
    assert tier.take(0, np.arange(30, 33), SlotState.READING, needed=True) is not None
    assert (tier.lookup(0, np.arange(4)) < 0).tolist() == [True, False, False, False]


def test_cached_blocks_stay_while_a_lease_will_give_room() -> None:
    tier = HostTier(1, 64, 4, window=2)
    cached = tier.admit(0, np.arange(2))
    assert cached is not None
    tier.finish_read(cached[0], ok=True)
    tier.release(cached[0], scan=True)
    leased = tier.admit(0, np.array([5, 6]))
    assert leased is not None
    tier.finish_read(leased[0], ok=True)
    assert tier.admit(0, np.array([7])) is None
    tier.release(leased[0], scan=True)
    assert tier.admit(0, np.array([7])) is not None
    assert (tier.lookup(0, np.arange(2)) >= 0).all()


def test_leased_and_dirty_slots_are_never_given_up() -> None:
    tier = HostTier(1, 64, 4, window=4)
    got = tier.admit(0, np.arange(2))
    assert got is not None
    dirty = tier.take(0, np.array([7, 8]), SlotState.DIRTY, needed=True)
    assert dirty is not None
    tier.finish_read(got[0], ok=True)
    assert tier.admit(0, np.array([9])) is None
    tier.check()


def test_forget_drops_every_layer() -> None:
    tier = HostTier(2, 8, 4, window=4)
    loaded(tier, 0, [3])
    loaded(tier, 1, [3])
    tier.forget(np.array([3, 5]))
    assert tier.free_count == 4
    tier.check()


def test_device_slots_refuse_with_the_number_needed() -> None:
    slots = DeviceSlots(10, 4, kv_heads=2)
    assert slots.free_count == 6
    taken = slots.take(6, "this test")
    assert slots.units(taken[:1]).tolist() == [[8], [9]]
    with pytest.raises(OutOfSlots, match=r"this test needs 3 device slots and 0 are free"):
        slots.take(3, "this test")
    slots.give_back(taken)
    assert slots.free_count == 6


@pytest.mark.parametrize("in_host", [[], [0], [3, 1], [0, 1, 2, 3, 4]])
def test_a_table_of_blocks_in_both_tiers(in_host: list[int]) -> None:
    """The entries of device slots, and of host slots as the operations count them."""
    slots = DeviceSlots(10, 4, kv_heads=3)
    placed = np.array([7, 4, 9, 5, 6], np.int32)
    places, host_slots = np.array(in_host, np.intp), np.array([11, 0, 8, 2, 5], np.int32)
    wanted = slots.units(placed)
    heads = np.arange(3, dtype=np.int32)[:, None]
    wanted[:, places] = host_unit(host_slots[: len(in_host)], heads, 3)
    placed[places] = -1
    table = slots.mixed_table(placed, places, host_slots[: len(in_host)])
    assert table.tolist() == [wanted.tolist()]
    assert table.dtype == np.int32
    assert not table.flags.writeable  # what a device need not copy
    assert table.base is None


def test_tiles_begin_at_fixed_places() -> None:
    assert tiles_of(0, 1000, 16, 512) == [Tile(0, 32), Tile(32, 63)]
    assert tiles_of(600, 1000, 16, 512) == [Tile(32, 63)]
    assert tiles_of(0, 1024, 16, 512) == [Tile(0, 32), Tile(32, 64)]
    assert tiles_of(0, 0, 16, 512) == []
