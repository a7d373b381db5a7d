"""Who may touch a block: the counts behind reads and writes that are admitted together."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hsswap.io.base import IOFile, Operation, Priority
from hsswap.io.runs import BlockOrder, BlockRun
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


@pytest.mark.parametrize("lengths", [[1], [3], [1, 4, 2], [FEW, 1], [7] * 40])
def test_reads_of_runs_are_counted_each(lengths: list[int]) -> None:
    order = BlockOrder(2, 1024)
    runs, first = list[BlockRun](), 5
    for length in lengths:
        runs.append(a_run(first, length))
        first += length + 1
    indices = np.concatenate([np.arange(run.first, run.first + run.count) for run in runs])
    for _ in range(2):
        assert order.admit_reads(1, indices)
    assert order.release_many(Operation.READ, runs)
    assert not order.admit_writes(1, indices[-1:]), "read twice, released once"
    assert order.release_many(Operation.READ, runs)
    assert order.admit_writes(1, np.arange(1024))


def a_run(first: int, count: int) -> BlockRun:
    whatever = np.zeros(count, np.int64)
    return BlockRun(
        Operation.READ, IOFile(Path(), 0), 0, whatever.view(np.uint64), 4096, Priority.NEEDED,
        lambda run, error: None, layer=1, first=first, positions=whatever, generations=whatever,
        seeds=[], notify=lambda positions, error: None,
    )  # fmt: skip
