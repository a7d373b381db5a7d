"""What is to be read ahead, and which part of it next: pure state, no I/O, no waiting."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

import numpy as np

from hsswap.loads import Blocks
from hsswap.tiers import I32, I64, READING

READ_AHEAD_BYTES = 256 * 1024
"""Reading ahead waits until this much has room: a submission costs as much as reading 64 KiB."""

AHEAD_BLOCKS = 128
"""Begun in one turn of the loop, if they have ``READ_AHEAD_BYTES`` or more."""
LOOKED_AT = 256
"""Blocks of a plan that are looked at in one turn, to find those."""


class Part(NamedTuple):
    """Blocks to read now, perhaps none, and the slots that were taken for them."""

    blocks: Blocks
    slots: I32


class Plans:
    """Blocks to read ahead, in order, of each owner. Guarded as the tiers are."""

    def __init__(self) -> None:
        self._of: dict[Hashable, deque[Blocks]] = {}

    def __contains__(self, owner: Hashable) -> bool:
        return owner in self._of

    @property
    def count(self) -> int:
        """Parts of plans: of one owner and one layer each."""
        return sum(map(len, self._of.values()))

    def replace(self, owner: Hashable, ahead: list[Blocks]) -> None:
        """Plan these for ``owner``, in place of what was planned for it before."""
        if ahead:
            self._of[owner] = deque(ahead)
        else:
            self._of.pop(owner, None)

    def forget(self, indices: I64) -> None:
        """Take these blocks out of every plan, in all layers."""
        for plan in self._of.values():
            for at, blocks in enumerate(plan):
                kept = ~np.isin(blocks.indices, indices)
                if not kept.all():
                    plan[at] = Blocks(blocks.pool, blocks.layer, blocks.indices[kept])

    def clear(self) -> None:
        """Plan nothing."""
        self._of.clear()

    def take(self) -> Part | None:
        """Take the next blocks out of the plans, as many as one turn of the loop may begin to read,
        with slots for those that the tier does not hold. None: nothing is planned, or there is too
        little room.
        """
        for owner, plan in list(self._of.items()):
            part = _next_part(plan)
            if not plan:
                del self._of[owner]
            if part is not None:
                return part
        return None


def _next_part(plan: deque[Blocks]) -> Part | None:
    """See :meth:`Plans.take`."""
    while plan and not len(plan[0].indices):
        plan.popleft()
    if not plan:
        return None
    pool, layer, indices = plan[0].pool, plan[0].layer, plan[0].indices
    tier, least = pool.tier, max(1, READ_AHEAD_BYTES // pool.block_bytes)
    absent = np.flatnonzero(tier.lookup(plan[0].group_layer, indices[:LOOKED_AT]) < 0)
    wanted = min(len(absent), max(AHEAD_BLOCKS, least))
    count = min(wanted, tier.free_count)
    if count < min(wanted, least):
        return None  # too little room to be worth a submission yet
    part = Blocks(pool, layer, indices[absent[:count]])
    slots = tier.take(part.group_layer, part.indices, READING, needed=False)
    assert slots is not None  # they are free
    end = int(absent[count]) if count < len(absent) else LOOKED_AT
    if end < len(indices):
        plan[0] = Blocks(pool, layer, indices[end:])
    else:
        plan.popleft()
    return Part(part, slots)
