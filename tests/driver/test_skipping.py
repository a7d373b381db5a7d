"""Graphs that are passed over once no sequence runs. Both devices."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from hsswap.driver.base import Graph
from hsswap.driver.round_operations import NO_TOKEN, CopyWork, RunningWork
from hsswap.errors import ArgumentError, ClosedError
from tests.driver.rig import Rig


class Sequences:
    """Words of sequences, and a graph that moves each position on by one."""

    def __init__(self, rig: Rig, count: int) -> None:
        self.rig = rig
        self.flags = rig.tensor(np.ones(count, np.uint32))
        self.pend = rig.tensor(np.zeros(count, np.uint32))
        self.pos = rig.tensor(np.zeros(count, np.int32))
        self.capacity = rig.tensor(np.zeros(count, np.int32))
        self.work = RunningWork(self.flags, self.pos, self.pend, self.capacity)

    def captured(self) -> Graph:
        """The graph, which runs always."""
        with self.rig.stream.capture() as graph:
            self.rig.device.copy_words(self.rig.stream, CopyWork(self.pos, self.pos, 1))
        return graph

    def runs(self, graph: Graph) -> bool:
        """Whether a launch moves the positions, all of them."""
        before = self.pos.array().copy()
        graph.launch(self.rig.stream)
        self.rig.stream.synchronize()
        moved = self.pos.array() - before
        assert len(set(moved.tolist())) == 1
        return bool(moved[0])


@pytest.mark.parametrize(("count", "s"), [(1, 0), (3, 1), (70, 69)])
def test_it_runs_while_a_sequence_does(rig: Rig, count: int, s: int) -> None:
    """All others have a flag: what sequence s does decides."""
    words = Sequences(rig, count)
    with rig.device.skipping(words.captured(), words.work) as graph:
        assert not words.runs(graph)
        for flag, pending, left in product((0, 1, 8), (5, NO_TOKEN), (-1, 0, 1)):
            words.flags.array()[s] = flag
            words.pend.array()[s] = pending
            words.pos.array()[s], words.capacity.array()[s] = 7, 7 + left
            assert words.runs(graph) == (flag == 0 and (pending == NO_TOKEN or left > 0))


def test_launches_ahead_stop_by_themselves(rig: Rig) -> None:
    """What a launch leaves decides about the next one, though the host saw neither."""
    words = Sequences(rig, 2)
    words.flags.array()[1], words.capacity.array()[1] = 0, 5
    with rig.device.skipping(words.captured(), words.work) as graph:
        for _ in range(20):
            graph.launch(rig.stream)
        rig.stream.synchronize()
    assert words.pos.array().tolist() == [5, 5]


def test_it_owns_what_it_launches(rig: Rig) -> None:
    """Closed once, both are; what is refused leaves the graph as it was."""
    words, held = Sequences(rig, 2), rig.device.live_count
    inner = words.captured()
    short = RunningWork(words.flags, words.pos, words.pend, words.capacity.rows(0, 1))
    with pytest.raises(ArgumentError, match="capacity"):
        rig.device.skipping(inner, short)
    words.flags.array()[0] = 0
    words.capacity.array()[0] = 9
    assert words.runs(inner)
    graph = rig.device.skipping(inner, words.work)
    assert words.runs(graph)
    graph.close()
    graph.close()
    assert inner.closed
    assert rig.device.live_count == held
    with pytest.raises(ClosedError):
        graph.launch(rig.stream)
    with pytest.raises(ArgumentError, match="closed"):
        rig.device.skipping(inner, words.work)
