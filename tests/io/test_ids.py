"""Block ids against a model in plain Python."""

from __future__ import annotations

import errno
import mmap
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hsswap.errors import ArgumentError, ConfigError, OutOfBlocks, StaleBlockId
from hsswap.io.contents import Contents
from hsswap.io.ids import (
    EXTENT_IDS,
    LAST_GENERATION,
    BlockIds,
    generation_of,
    id_of,
    index_of,
)

CAPACITY = 72  # four extents and a half


class IdsMachine(RuleBasedStateMachine):
    """Every call on BlockIds and on dictionaries."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = BlockIds(CAPACITY)
        self.ids.on_freed = lambda indices: self.freed.extend(indices.tolist())
        self.freed: list[int] = []
        self.references: dict[int, int] = {}
        self.generations = dict.fromkeys(range(CAPACITY), 1)
        self.dead: list[int] = []

    def used_extents(self) -> set[int]:
        return {index_of(block_id) // EXTENT_IDS for block_id in self.references}

    @rule(count=st.integers(0, 40), follow=st.booleans(), pick=st.randoms(use_true_random=False))
    def allocate(self, count: int, follow: bool, pick: object) -> None:
        live = sorted(self.references)
        after = pick.choice(live) if follow and live else None  # type: ignore[attr-defined]
        if count > CAPACITY - len(live):
            with pytest.raises(OutOfBlocks, match=f"{count} blocks wanted, {CAPACITY - len(live)}"):
                self.ids.allocate(count, after)
            return
        used = self.used_extents()
        empty = [e for e in range(CAPACITY // EXTENT_IDS) if e not in used]
        taken = self.ids.allocate(count, after).tolist()
        assert len(set(taken)) == count
        for block_id in taken:
            index = index_of(block_id)
            assert generation_of(block_id) == self.generations[index]
            assert block_id not in self.references
            self.references[block_id] = 1
        indices = [index_of(block_id) for block_id in taken]
        if count and after is None and empty:
            assert indices[0] // EXTENT_IDS in empty
            assert indices[0] % EXTENT_IDS == 0
        if after is not None:
            begin = index_of(after) + 1
            free_behind = 0
            before = {index_of(i) for i in live}
            while begin + free_behind < CAPACITY and begin + free_behind not in before:
                free_behind += 1
            length = min(count, free_behind)
            assert indices[:length] == list(range(begin, begin + length))

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def add(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=8))
        self.ids.add_reference(some)
        for block_id in some:
            self.references[block_id] += 1

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def drop(self, data: st.DataObject) -> None:
        some = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=24))
        counts = Counter(some)
        if any(count > self.references[block_id] for block_id, count in counts.items()):
            with pytest.raises(ArgumentError, match="dropped"):
                self.ids.drop_reference(some)
            return
        expected = sorted(i for i, count in counts.items() if count == self.references[i])
        self.freed.clear()
        assert sorted(self.ids.drop_reference(some).tolist()) == expected
        assert sorted(self.freed) == sorted(index_of(block_id) for block_id in expected)
        for block_id, count in counts.items():
            self.references[block_id] -= count
            if self.references[block_id] == 0:
                del self.references[block_id]
                self.generations[index_of(block_id)] += 1
                self.dead.append(block_id)

    @rule(data=st.data())
    def refuse_stale(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, CAPACITY + 3))
        strange = [-1, -(2**63), id_of(index, 0), id_of(index, self.generations.get(index, 1) + 1)]
        bad = data.draw(st.sampled_from([*strange, *self.dead]))
        mixed = [*sorted(self.references)[:2], bad]
        for call in (self.ids.check, self.ids.add_reference, self.ids.drop_reference):
            with pytest.raises(StaleBlockId):
                call(mixed)
        with pytest.raises(StaleBlockId):
            self.ids.refcount(bad)
        with pytest.raises(StaleBlockId):
            self.ids.allocate(1, bad)

    @invariant()
    def agrees(self) -> None:
        live = sorted(self.references)
        assert self.ids.free_count == CAPACITY - len(live)
        assert self.ids.check(live).tolist() == [index_of(block_id) for block_id in live]
        assert [self.ids.refcount(i) for i in live] == [self.references[i] for i in live]
        everything = np.arange(CAPACITY)
        used = {index_of(block_id) for block_id in live}
        assert self.ids.generations(everything).tolist() == list(self.generations.values())
        assert np.flatnonzero(self.ids.used(everything)).tolist() == sorted(used)
        assert self.ids.any_used(0, CAPACITY) == bool(used)


TestIds = IdsMachine.TestCase
TestIds.settings = settings(max_examples=25, stateful_step_count=25)


def test_long_owners_get_adjoining_extents() -> None:
    ids = BlockIds(160)
    a, b, c = ids.allocate(16), ids.allocate(16), ids.allocate(40)
    ids.drop_reference(a)
    assert ids.check(ids.allocate(32)).tolist() == list(range(80, 112))
    assert ids.check(ids.allocate(16)).tolist() == list(range(16))
    assert ids.check(b).tolist() == list(range(16, 32))
    assert ids.check(c).tolist() == list(range(32, 72))


def test_owners_that_grow_in_turns_keep_runs_of_sixteen() -> None:
    ids = BlockIds(6 * 64)
    owned: list[list[int]] = [[] for _ in range(6)]
    for _ in range(64):
        for mine in owned:
            mine.extend(ids.allocate(1, after=mine[-1] if mine else None).tolist())
    for mine in owned:
        indices = ids.check(mine)
        for start in range(0, 64, EXTENT_IDS):
            extent = indices[start : start + EXTENT_IDS]
            assert extent.tolist() == list(range(extent[0], extent[0] + EXTENT_IDS))


def test_the_last_freed_is_not_the_next_given_out() -> None:
    ids = BlockIds(64)
    first, second = ids.allocate(16), ids.allocate(16)
    ids.drop_reference(second[3:5])
    assert ids.check(ids.allocate(2)).tolist() == [32, 33]
    assert ids.check(first).tolist() == list(range(16))


def test_a_generation_never_runs_over() -> None:
    ids = BlockIds(2)
    ids._generations[:] = LAST_GENERATION
    last = ids.allocate(1)
    assert last[0] > 0
    assert index_of(int(last[0])) == 0
    ids.drop_reference(last)
    assert ids.free_count == 1
    assert ids.check(ids.allocate(1)).tolist() == [1]
    with pytest.raises(OutOfBlocks):
        ids.allocate(1)
    with pytest.raises(StaleBlockId):
        ids.check(last)


@pytest.mark.parametrize(
    "bad", [[1.0], np.zeros((2, 2), np.int64), [2**70], ["1"], [None], [True, False]]
)
def test_what_is_no_id_is_refused(bad: object) -> None:
    with pytest.raises(ArgumentError):
        BlockIds(4).check(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("capacity", [0, -1, 2**32])
def test_capacity_is_checked(capacity: int) -> None:
    with pytest.raises(ConfigError):
        BlockIds(capacity)


def test_a_negative_count_is_refused() -> None:
    with pytest.raises(ArgumentError):
        BlockIds(4).allocate(-1)


def test_capacity_below_an_extent() -> None:
    ids = BlockIds(5)
    assert ids.check(ids.allocate(3)).tolist() == [0, 1, 2]
    with pytest.raises(OutOfBlocks, match="2 of 5"):
        ids.allocate(3)
    assert ids.check(ids.allocate(2)).tolist() == [3, 4]


def test_a_huge_capacity_costs_what_is_used_of_it() -> None:
    before = resident_bytes()
    ids = BlockIds((1 << 32) - 1)
    contents = Contents(32, ids.capacity)
    first = ids.allocate(100)
    assert ids.check(first).tolist() == list(range(100))
    far = ids.allocate(1, after=int(first[-1]))
    assert index_of(int(far[0])) == 100
    ids.drop_reference(first)
    again = ids.allocate(40)
    assert index_of(int(again[0])) == 0
    assert generation_of(int(again[0])) == 2
    assert ids.generations(np.array([3_000_000_000])).tolist() == [1]
    assert not contents.written[31, 3_000_000_000]
    assert ids.free_count == ids.capacity - 41
    assert ids.last_generation == 2
    assert resident_bytes() - before < 64 << 20


def resident_bytes() -> int:
    """Of this process."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * mmap.PAGESIZE


def test_a_capacity_that_the_system_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("mmap.mmap", refuse)
    with pytest.raises(ConfigError, match=r"8000 bytes .* lower its capacity"):
        BlockIds(1000)
