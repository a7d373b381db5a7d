"""Plans of reads ahead: what one turn takes, in which order, and that nothing of a plan is lost."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsswap import plans
from hsswap.loads import Blocks
from hsswap.plans import Plans
from hsswap.pools import GroupPool
from hsswap.tiers import READING, HostTier

LAYERS, IDS = 3, 1000


class Pool:
    """What plans need of a GroupPool."""

    first_layer = 0

    def __init__(self, slots: int, block_bytes: int) -> None:
        self.tier = HostTier(LAYERS, IDS, slots, window=slots)
        self.block_bytes = block_bytes


def blocks_of(pool: Pool, layer: int, indices: Any) -> Blocks:
    return Blocks(cast(GroupPool, pool), layer, np.asarray(indices, np.int64))


LISTS = st.lists(
    st.tuples(st.integers(0, LAYERS - 1), st.sets(st.integers(0, IDS - 1), max_size=400)),
    max_size=4,
)


@given(owners=st.lists(LISTS, max_size=3), there=LISTS, block_kib=st.sampled_from([4, 64, 1024]))
def test_every_block_of_a_plan_is_taken_once_in_bounded_parts(
    owners: list[list[tuple[int, set[int]]]],
    there: list[tuple[int, set[int]]],
    block_kib: int,
) -> None:
    pool = Pool(LAYERS * IDS, block_kib << 10)
    for layer, indices in there:
        new = np.array(sorted(i for i in indices if pool.tier.lookup(layer, np.array([i]))[0] < 0))
        if len(new):
            assert pool.tier.take(layer, new, READING, needed=False) is not None
    held = {
        (n, i) for n in range(LAYERS) for i in np.flatnonzero(pool.tier.slot_of[n] >= 0).tolist()
    }
    planned = Plans()
    wanted: list[tuple[int, int]] = []
    for owner, lists in enumerate(owners):
        planned.replace(owner, [blocks_of(pool, n, sorted(indices)) for n, indices in lists])
        wanted += [(n, i) for n, indices in lists for i in sorted(indices)]
    taken: list[tuple[int, int]] = []
    most = max(plans.AHEAD_BLOCKS, plans.READ_AHEAD_BYTES // pool.block_bytes)
    turns = 0
    while (part := planned.take()) is not None:
        turns += 1
        assert len(part.blocks.indices) == len(part.slots) <= most
        taken += [(part.blocks.layer, i) for i in part.blocks.indices.tolist()]
    assert taken == [one for one in dict.fromkeys(wanted) if one not in held]
    assert planned.count == 0
    assert turns <= len(wanted) // plans.AHEAD_BLOCKS + sum(map(len, owners)) * 2


@given(slots=st.integers(1, 300), count=st.integers(1, 400), block_kib=st.sampled_from([4, 64]))
def test_little_room_is_waited_for(slots: int, count: int, block_kib: int) -> None:
    pool = Pool(slots, block_kib << 10)
    least = plans.READ_AHEAD_BYTES // pool.block_bytes
    planned = Plans()
    planned.replace("a", [blocks_of(pool, 1, np.arange(count))])
    taken = 0
    while (part := planned.take()) is not None:
        # Fewer than make a submission pay only at the end of a plan.
        assert len(part.slots) >= min(least, count - taken)
        taken += len(part.slots)
    if taken < count:
        assert pool.tier.free_count < min(least, count - taken)
    held = pool.tier.lookup(1, np.arange(count)) >= 0
    assert held[:taken].all()
    assert not held[taken:].any()
    pool.tier.check()


def test_forgotten_blocks_are_in_no_plan() -> None:
    pool, planned = Pool(100, 1 << 20), Plans()
    planned.replace("a", [blocks_of(pool, 0, [1, 2, 3]), blocks_of(pool, 1, [2])])
    planned.replace("b", [blocks_of(pool, 2, [3, 2])])
    planned.forget(np.array([2]))
    got = []
    while (part := planned.take()) is not None:
        got += [(part.blocks.layer, i) for i in part.blocks.indices.tolist()]
    assert got == [(0, 1), (0, 3), (2, 3)]


def test_a_plan_takes_the_place_of_its_owners_last_one() -> None:
    pool, planned = Pool(100, 1 << 20), Plans()
    planned.replace("a", [blocks_of(pool, 0, [1])])
    planned.replace("b", [blocks_of(pool, 0, [2])])
    planned.replace("a", [blocks_of(pool, 0, [3])])
    planned.replace("b", [])
    assert "a" in planned
    assert "b" not in planned
    part = planned.take()
    assert part is not None
    assert part.blocks.indices.tolist() == [3]
    assert planned.take() is None


@pytest.mark.parametrize("free", [0, 1])
def test_who_has_no_room_does_not_keep_others_from_theirs(free: int) -> None:
    full, roomy = Pool(4 + free, 64 << 10), Pool(100, 64 << 10)
    assert full.tier.take(0, np.arange(4), READING, needed=False) is not None
    planned = Plans()
    planned.replace("a", [blocks_of(full, 0, np.arange(10, 20))])
    planned.replace("b", [blocks_of(roomy, 0, np.arange(10))])
    part = planned.take()
    assert part is not None
    assert part.blocks.pool is cast(GroupPool, roomy)
    assert planned.take() is None
    assert "a" in planned
