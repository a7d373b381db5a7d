"""Who may touch a block: the counts behind reads and writes that are admitted together."""

from __future__ import annotations

import numpy as np
import pytest

from hsswap.io.runs import BlockOrder
from hsswap.io.tables import FEW


@pytest.mark.parametrize("count", [2, FEW - 1, FEW, FEW + 1, 300])
def test_reads_together_are_counted_each(count: int) -> None:
    order = BlockOrder(3, 1024)
    indices = np.arange(0, 2 * count, 2)
    twice = np.concatenate((indices, indices[:1]))
    assert order.admit_reads(1, twice)
    assert not order.admit_writes(1, indices[-1:])
    assert order.admit_reads(1, indices)  # readers share
    for _ in range(2):
        assert order.release_reads(1, indices.tolist())
    assert not order.admit_writes(1, indices[:1]), "the first block was read three times"
    assert order.admit_writes(1, indices[1:])
    assert not order.admit_reads(1, indices)
    assert order.admit_reads(1, indices[:1])
    assert order.unsettled(1, indices).tolist() == [False] + [True] * (count - 1)
    for layer in (0, 2):
        assert order.admit_writes(layer, indices), "another layer's blocks"
